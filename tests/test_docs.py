"""The documents say what is so: commands parse, examples load, names exist, and the tables of old names are complete."""

import argparse
import dataclasses
import importlib
import inspect
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pellucid.cli import build_parser
from pellucid.cli.settings import split_settings
from pellucid.config import ModelConfig, RunConfig, load_config
from pellucid.model import Transformer
from pellucid.registry import lookup, names
from pellucid.serve_config import load_serve_config

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMING_FROM = ROOT / "docs" / "coming-from.md"

ISSUES = {
    "Full sharding, one logical checkpoint",
    "The inference engine",
    "The server",
    "Post-training",
    "GRPO",
}
"""Titles of the issues that may be named as bringing something later."""


def words_of(text: str) -> list[str]:
    return text.split()


ASTRAI = words_of(
    """
astrai.config astrai.dataset astrai.model astrai.tokenize astrai.trainer astrai.parallel astrai.inference
astrai.serialization astrai.factory astrai.protocols
BaseConfig BaseModelConfig AutoRegressiveLMConfig EncoderConfig ConfigFactory TrainConfig DatasetFactory AutoTokenizer
GenerationRequest InferenceEngine Trainer CallbackFactory StrategyFactory SchedulerFactory BaseFactory AutoModel
AutoRegressiveLM __version__ Registry AttnFactory FFNFactory ExecutorFactory BaseExecutor BaseStrategy
create get_component_class list_registered is_registered list_by_category list_by_priority
to_dict from_dict from_file to_file from_pretrained save_pretrained disable_random_init strict
ResumableDistributedSampler save_h5 save_json DatasetFactory.load dataset.count dataset.keys data_0
sequence loss_mask chosen rejected chosen_mask rejected_mask prompts responses masks rewards input_ids target_ids
window_size stride storage_type start_epoch start_iter drop_last shuffle
EmbeddingEncoder GQA MLA MLP DeepSeekMoE RMSNorm Linear Embedding RotaryEmbedding DecoderBlock
input_mask paged_cache position_ids logits hidden_states
model_type vocab_size dim n_layers norm_eps dim_ffn tie_weight max_len rope_theta attn_type n_heads n_kv_heads
use_qk_norm use_gated_attention kv_lora_rank qk_nope_head_dim qk_rope_head_dim ffn_type n_routed_experts
n_shared_experts n_activated_experts topk_method pooling_type normalize_embeddings
embed_tokens layers.N.attention input_norm post_attention_norm lm_head
ChatTemplate encode decode stop_ids special_tokens chat_template apply_chat_template system_prompt
add_generation_prompt add_special_tokens is_pretokenized out_ids skip_special_tokens
model strategy dataset optimizer_fn scheduler_fn n_epoch batch_per_device grad_accum_steps max_grad_norm
gradient_checkpointing_modules start_batch ckpt_dir ckpt_interval log_dir log_interval metrics random_seed num_workers
prefetch_factor pin_memory nprocs backend master_addr master_port parallel_mode start_method device_type val_dataset
val_step executor_kwargs extra_kwargs
seq sft dpo grpo beta reduction clip_eps kl_coef group_size sync_interval label_smoothing get_logprobs
cosine sgdr warmup_steps lr_decay_steps min_rate cycle_length t_mult Muon
TrainContext TrainContextBuilder gradient_checkpointing checkpoint metric_logger progress_bar gradient_clipping
validation loss lr val_loss grad_norm grad_std grad_max grad_min grad_mean grad_nan_num
on_train_begin on_train_end on_epoch_begin on_epoch_end on_batch_begin on_batch_end on_optimizer_step on_error
GradientState AccumOptimizer AccumScheduler prepare accumulate backward unwrap_model use_distributed sync_gradients
none ddp spawn_parallel_fn setup_parallel get_rank get_world_size get_current_device only_on_rank
RowParallelLinear ColumnParallelLinear OptimizerProtocol SchedulerProtocol
Checkpoint meta.json state_dict.safetensors optimizer.pt scheduler.pt
generate generate_async generate_with_request stream max_tokens temperature top_p top_k get_stats shutdown
max_batch_size max_seq_len max_prompt_len page_size
KVCache KvcacheView PagePool TaskTable PrefixCache Allocator Storage
ProtocolHandler StopChecker StreamContext run_server
scripts/tools/train.py scripts/tools/generate.py scripts/tools/perplexity.py scripts/tools/server.py
scripts/tools/benchmark.py scripts/demo/download.py scripts/demo/generate_ar.py scripts/demo/generate_batch.py
scripts/demo/stream_chat.py Dockerfile docker-compose docker.sh pre_commit.sh
--train_type --data_root_path --n_epoch --batch_per_device --grad_accum_steps --warmup_ratio --max_lr --max_grad_norm
--adamw_beta1 --adamw_beta2 --adamw_weight_decay --random_seed --num_workers --no_pin_memory --window_size --stride
--dpo_beta --group_size --grpo_clip_eps --grpo_kl_coef --grpo_sync_interval --label_smoothing --ckpt_interval --ckpt_dir
--start_epoch --start_batch --nprocs --parallel_mode --device_type --start_method
--input_json_file --output_json_file --question_key --response_key --temperature --top_k --top_p --batch_size
--max_tokens --model_dir --input_file --output_file --text_key --host --port --reload --param-path --device --dtype
--max_batch_size --repo-id --local-dir --force
"""
) + ["GET /health", "GET /stats", "POST /v1/chat/completions", "POST /v1/messages", "--param_path of train.py"]
"""Packages, classes, functions, fields, hooks, batch keys, files, flags and routes of the framework."""

DISTRIBUTED = words_of("""
DDP bucket_size_mb .module finish_gradient_sync ShardedOptimizer param_groups step zero_grad state_dict load_state_dict
add_param_group train() world_size backend seed batch_size iterations warm-up lr val_interval checkpoint_interval
gradient_clip load_checkpoint MASTER_ADDR MASTER_PORT
""")
"""The interface of the from-scratch transformer's parallel/ and of the script that launches it."""


def fenced(language: str) -> list[Any]:
    """Each fenced block of that language in each document, as (text) with an id that names the place."""
    found = []
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            found.append(pytest.param(match[1], id=f"{path.name}:{line}"))
    return found


def commands() -> list[Any]:
    """Each shell command of the documents, continuation lines joined, comments and prompts left out."""
    found = []
    for block in fenced("bash"):
        for line in block.values[0].replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                words = shlex.split(part, comments=True)
                if words:
                    found.append(pytest.param(words, id=f"{block.id} {' '.join(words)}"[:100]))
    return found


def rows(section: str) -> list[tuple[str, str]]:
    """(there, here) of every row of the tables below a heading of coming-from.md."""
    text = COMING_FROM.read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    found = []
    for line in body.splitlines():
        if line.startswith("|") and not line.startswith(("| there |", "|---")):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == 2, line
            found.append((cells[0].strip(), cells[1].strip()))
    return found


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


ALL_ROWS = rows("From AstrAI") + rows("From the from-scratch transformer's `parallel/`")


# -- old names -> new names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "wanted"),
    [("From AstrAI", ASTRAI), ("From the from-scratch transformer's `parallel/`", DISTRIBUTED)],
)
def test_every_public_name_of_the_reference_systems_has_a_row(section: str, wanted: list[str]) -> None:
    there = {name for cell, _ in rows(section) for name in ticked(cell)}
    there |= {cell.replace("`", "") for cell, _ in rows(section)}
    assert sorted(set(wanted) - there) == []


@pytest.mark.parametrize(("there", "here"), ALL_ROWS)
def test_what_is_planned_names_an_issue(there: str, here: str) -> None:
    assert here, f"{there} has no counterpart"
    for title in re.findall(r"planned: ([^);]*)", here):
        assert any(title.startswith(issue) for issue in ISSUES), f"{there}: no issue is called {title!r}"
    if not re.search(r"planned: |^none: ", here):
        assert ticked(here) or "config.json" in here, f"{there}: {here!r} names nothing that exists"


@pytest.mark.parametrize(("there", "here"), [row for row in ALL_ROWS if not row[1].startswith("planned")])
def test_each_name_of_ours_exists(there: str, here: str) -> None:
    for name in ticked(here):
        fault = missing(name)
        assert fault is None, f"{there}: {fault}"


def missing(name: str) -> str | None:
    """Why a name that a document gives for Pellucid's own does not exist, or None."""
    if name.startswith("pellucid "):
        return command_fault(shlex.split(name))
    if name.startswith("make "):
        return None if name.split()[1] in make_targets() else f"no target {name}"
    if name.startswith("--"):
        flag = name.split()[0]
        if "." in flag:
            return setting_fault(flag[2:])
        return None if flag in all_flags() else f"no command takes {flag}"
    if re.match(r"(pellucid|torch)(\.\w+)+$", name):
        return import_fault(name)
    if re.match(r"(tests|docs|configs|bench|pellucid)/[\w./-]*$", name):
        return None if (ROOT / name).exists() else f"no file {name}"
    if name.endswith(".weight"):
        return None if name in weight_names() else f"no weight {name}"
    key = name.partition(" = ")[0]
    is_file = re.search(r"\.(safetensors|json|toml|txt|md)$", key)
    if re.match(r"(model|data|strategy|optim|parallel|train|callbacks)\.[\w.]+$", key) and not is_file:
        return setting_fault(key, name.partition(" = ")[2])
    return None


def import_fault(dotted: str) -> str | None:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            fields = {f.name for f in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
            if part in fields or (isinstance(found, type) and f"self.{part}" in inspect.getsource(found)):
                return None
            if not hasattr(found, part):
                return f"{dotted} cannot be imported"
            found = getattr(found, part)
        return None
    return f"{dotted} cannot be imported"


def setting_fault(key: str, value: str = "") -> str | None:
    """Whether a dotted key is one of the configuration, options of registered entries included."""
    head, *rest = key.split(".")
    if head == "callbacks":
        return None if rest[0] in names("callback") else f"no callback {rest[0]}"
    if value:
        load_config(None, {key: value.strip('"')})
        return None
    config: Any = RunConfig()
    for part in key.split(".")[:-1]:
        config = getattr(config, part)
    fields = {f.name: f for f in dataclasses.fields(config)}
    if rest[-1] in fields:
        return None
    kind = fields["options"].metadata["kind"] if "options" in fields else None
    every = {f.name for name in names(kind) for f in dataclasses.fields(lookup(kind, name).config)} if kind else set()
    return None if rest[-1] in every else f"no key {key}"


@cache
def weight_names() -> set[str]:
    model = Transformer(ModelConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, tie_word_embeddings=False))
    return set(model.state_dict())


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def all_flags() -> set[str]:
    return {flag for parser in subparsers().values() for action in parser._actions for flag in action.option_strings}


def command_fault(words: list[str]) -> str | None:
    """Why `pellucid ...` would be refused as bad usage, or None; a bare command name only has to exist."""
    known = subparsers()
    if words[1:] and not words[1].startswith("-") and words[1] not in known:
        return f"no command {words[1]}"
    if len(words) <= 2 and words[1:] != ["--version"]:
        return None
    rest, settings = split_settings(words[1:])
    try:
        args = build_parser().parse_args(rest)
    except SystemExit as end:
        return None if end.code == 0 else f"{shlex.join(words)} is refused"
    if settings and not getattr(args, "takes_settings", False):
        return f"{words[1]} takes no settings"
    if settings:
        config = getattr(args, "config", None)
        load_config(ROOT / config if config else None, settings)
    return None


# -- commands and examples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", commands())
def test_each_command_is_one_that_works(words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        assert set(arguments) <= make_targets()
    elif program.rpartition("/")[2] == "pellucid":
        assert command_fault(["pellucid", *arguments]) is None
    elif "pellucid" in arguments and arguments[0] == "-m":
        assert command_fault(arguments[1:]) is None
    else:
        assert program.rpartition("/")[2] in ("python3", "pip", "python", "git", "cd", "torchrun"), (
            f"what is {program}?"
        )


def test_the_readme_begins_with_its_two_commands() -> None:
    (first, *_) = [block for block in fenced("bash") if str(block.id).startswith("README")]
    assert [line.split("#")[0].strip() for line in first.values[0].splitlines()] == ["make demo", "make test"]


def test_configurations_named_in_commands_exist() -> None:
    for command in commands():
        for word in command.values[0]:
            if re.match(r"configs/[\w.]+$", word):
                assert (ROOT / word).is_file(), word


@pytest.mark.parametrize("text", fenced("toml"))
def test_each_toml_example_loads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    path.write_text(text, encoding="utf-8")
    if text.startswith("# serve.toml"):
        load_serve_config(path, {})
    else:
        load_config(path)


@pytest.mark.parametrize("text", fenced("python"))
def test_each_python_example_compiles_and_imports_what_exists(text: str) -> None:
    compile(text, "example", "exec")
    for module, imported in re.findall(r"^from (pellucid[\w.]*) import (.+)$", text, re.MULTILINE):
        for name in imported.split(","):
            assert import_fault(f"{module}.{name.strip()}") is None
    for name in re.findall(r"\bpellucid\.\w+", text):
        assert import_fault(name) is None


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_names_in_the_text_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    if path == COMING_FROM:
        text = text.partition("## From")[0]
    faults = [fault for name in ticked(text) if (fault := missing(name))]
    assert faults == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_each_configuration_that_ships_loads(path: Path) -> None:
    load_config(path)


# -- the checks themselves -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "pellucid trane", "pellucid train --nope 1 --out x", "pellucid train --train.stepz 1 --out x", "make nothing",
        "--no-such-flag", "--train.stepz", "pellucid.no_such", "pellucid.config.NoSuch", "train.stepz", "optim.beta",
        "callbacks.nothing", 'optim.schedule.name = "cosin"',
    ],
)  # fmt: skip
def test_a_name_that_does_not_exist_is_noticed(name: str) -> None:
    try:
        assert missing(name) is not None
    except Exception as error:
        assert not isinstance(error, AssertionError)
