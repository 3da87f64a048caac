"""The table of docs/models.md is what runs: each architecture is imported, exported, trained and generated from.

To write a row anew after a change (a new architecture needs a line that begins with its name first):

    PELLUCID_WRITE_TABLE=1 python -m pytest tests/checkpoint/test_family_table.py
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    EXPERTS,
    GQA,
    LATENT,
    SHAPE,
    TOKENS,
    V2,
    V2_LITE,
    V3,
    largest_difference,
    make_model,
    open_with_transformers,
    saved_by_transformers,
)
from gguf_files import write_model
from support import tiny_config, windows
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pellucid.checkpoint.encoder_folder import load_encoder, save_encoder
from pellucid.checkpoint.gguf_export import export_gguf
from pellucid.checkpoint.gguf_import import import_gguf
from pellucid.checkpoint.model_folder import load_model, save_model
from pellucid.config import ModelConfig
from pellucid.inference import SamplingParams, generate
from pellucid.model import EmbedConfig, Encoder, Transformer
from pellucid.train import Callback, Trainer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
PROMPTS: list[list[int]] = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist(), TOKENS[0, 25:].tolist()]
NEW = 12
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 8}
WORST = 1e-5
"""No row may state more."""


@dataclass
class Row:
    """What a row says: which of the four work, and how far logits are from the reference's at most."""

    imports: bool
    exports: bool
    trains: bool
    generates: bool
    difference: float

    def line(self, name: str, kind: str) -> str:
        works = (self.imports, self.exports, self.trains, self.generates)
        cells = ["yes" if each else "–" for each in works]
        return f"| {name} | {kind} | {' | '.join(cells)} | {rounded_up(self.difference)} |"


def rounded_up(difference: float) -> str:
    """Twice as much, to one digit of 1, 2, 5: another machine adds up in another order."""
    if difference == 0:
        return "0"
    exponent = math.floor(math.log10(2 * difference))
    digit = next(d for d in (1, 2, 5, 10) if d * 10.0**exponent >= 2 * difference)
    return f"{digit * 10.0**exponent:.0e}".replace("e-0", "e-")


# -- what is done with each -----------------------------------------------------------------------------------


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_before_step(self, trainer: Any, info: Any) -> None:
        self.losses.append(info.loss)


def trains(config: ModelConfig) -> bool:
    """Whether a few steps of the Trainer lower the loss and move every weight; a frozen bias moves by counts."""
    shape = {key: getattr(config, key) for key in config.__slots__ if key not in ("num_key_value_heads", "head_dim")}
    if not config.is_latent:
        shape |= {"num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    if config.n_routed_experts:
        shape |= {"router_aux_loss_coef": 0.01}
    if config.topk_method == "noaux_tc":
        shape |= {"router_bias_update_speed": 0.001}
    run = tiny_config(model=shape | {"vocab_size": 61}, train__steps=16, train__val_every=0, optim__lr=3e-3)
    recorder = Losses()
    trainer = Trainer(run, train_data=windows(12), callbacks=[recorder])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    unmoved = [name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])]
    assert not unmoved
    return sum(recorder.losses[-4:]) < sum(recorder.losses[:4])


@torch.no_grad()
def recomputed(model: Transformer, prompt: list[int]) -> list[int]:
    ids, length = list(prompt), len(prompt) + NEW
    while len(ids) < length:
        ids.append(int(model(torch.tensor([ids]), rope_length=length).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generates(model: Transformer, theirs: Any = None) -> bool:
    """Greedy ids with the cache are those of recomputing everything, and of transformers with its own cache."""
    found = [r.ids for r in generate(model, PROMPTS, SamplingParams(temperature=0, max_tokens=NEW))]
    assert len({i for ids in found for i in ids}) > 4
    if theirs is not None:
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        for prompt, ids in zip(PROMPTS, found, strict=True):
            assert ids == theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    return found == [recomputed(model, prompt) for prompt in PROMPTS]


def of_transformers(config: PreTrainedConfig) -> Callable[[Path], Row]:
    def run(folder: Path) -> Row:
        theirs = saved_by_transformers(config, folder / "theirs")
        ours = load_model(folder / "theirs").model
        save_model(folder / "ours", ours)
        back = open_with_transformers(folder / "ours")
        there, again = largest_difference(ours, theirs), largest_difference(ours, back)
        assert back.config.model_type == config.model_type
        return Row(there < WORST, again < WORST, trains(ours.config), generates(ours, theirs), max(there, again))

    return run


def of_our_own(config: ModelConfig) -> Callable[[Path], Row]:
    """Nothing else computes these: what is saved is compared with what is loaded."""

    def run(folder: Path) -> Row:
        model = make_model(config)
        save_model(folder / "ours", model)
        again = load_model(folder / "ours").model
        assert again.config == config
        with torch.no_grad():
            difference = float((model(TOKENS).logits - again(TOKENS).logits).abs().max())
        return Row(True, True, trains(config), generates(again), difference)

    return run


def gguf_llama(folder: Path) -> Row:
    model = make_model(ModelConfig(**SHAPE, **GQA))
    import_gguf(write_model(folder / "given.gguf", model), folder / "imported")
    ours = load_model(folder / "imported").model
    theirs = open_with_transformers(folder / "imported")
    export_gguf(folder / "imported", folder / "written.gguf", kind="f32")
    import_gguf(folder / "written.gguf", folder / "again")
    again = load_model(folder / "again").model
    equal = all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    difference = largest_difference(ours, theirs)
    return Row(difference < WORST, equal, trains(ours.config), generates(ours, theirs), difference)


def bert(folder: Path) -> Row:
    torch.manual_seed(0)
    theirs = BertModel(BertConfig(**SHAPE)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.2 * torch.randn(p.shape)
    theirs.save_pretrained(folder / "theirs")
    ours = load_encoder(folder / "theirs").encoder
    save_encoder(folder / "ours", ours)
    back = BertModel.from_pretrained(folder / "ours").eval()
    tokens = TOKENS[:, :32]
    with torch.no_grad():
        mine = ours(tokens, torch.tensor([32, 32])).hidden
        there, again = (
            float((mine - each(input_ids=tokens).last_hidden_state).abs().max() / mine.std()) for each in (theirs, back)
        )
    return Row(there < WORST, again < WORST, False, False, max(there, again, 1e-7))  # equal here, maybe not elsewhere


def own_encoder(folder: Path) -> Row:
    model = Encoder(ModelConfig(**SHAPE, **GQA), EmbedConfig()).eval()
    save_encoder(folder / "ours", model)
    again = load_encoder(folder / "ours").encoder
    tokens, lengths = TOKENS[:, :32], torch.tensor([32, 32])
    with torch.no_grad():
        difference = float((model(tokens, lengths).hidden - again(tokens, lengths).hidden).abs().max())
    return Row(True, True, False, False, difference)


THEIR_V2 = {key: value for key, value in V2.items() if key != "rope_interleave"}
THEIR_LITE = {key: value for key, value in V2_LITE.items() if key != "rope_interleave"} | {"q_lora_rank": None}
THEIR_V3 = {key: value for key, value in V3.items() if key not in ("scoring_func", "topk_method")}
THEIR_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}

ROWS: dict[str, tuple[str, Callable[[Path], Row]]] = {
    "Llama": ("llama", of_transformers(LlamaConfig(**SHAPE | GQA))),
    "Mistral": ("mistral", of_transformers(MistralConfig(**SHAPE | GQA, sliding_window=9))),
    "Qwen2": ("qwen2", of_transformers(Qwen2Config(**SHAPE | GQA))),
    "Qwen3": ("qwen3", of_transformers(Qwen3Config(**SHAPE | GQA, head_dim=16))),
    "Qwen3-MoE": (
        "qwen3_moe",
        of_transformers(Qwen3MoeConfig(**SHAPE | GQA | THEIR_EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[0])),
    ),
    "DeepSeek-V2": ("deepseek_v2", of_transformers(DeepseekV2Config(**SHAPE | THEIR_V2))),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        of_transformers(DeepseekV2Config(**SHAPE | THEIR_LITE, rope_parameters=YARN | {"rope_theta": 500.0})),
    ),
    "DeepSeek-V3": ("deepseek_v3", of_transformers(DeepseekV3Config(**SHAPE | THEIR_V3, num_key_value_heads=4))),
    "latent attention with a gate": ("pellucid", of_our_own(ModelConfig(**SHAPE | LATENT, attention_gate=True))),
    "experts with grouped heads": ("pellucid", of_our_own(ModelConfig(**SHAPE | GQA | EXPERTS, n_shared_experts=1))),
    "GGUF of a Llama": ("llama", gguf_llama),
    "BERT": ("bert", bert),
    "encoder": ("pellucid_encoder", own_encoder),
}  # fmt: skip


# -- the document ---------------------------------------------------------------------------------------------


def stated() -> dict[str, str]:
    """The table's lines by their first cell, in order."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| architecture |"))
    rows: dict[str, str] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows[line.split("|")[1].strip()] = line
    return rows


def test_the_table_has_every_architecture() -> None:
    assert list(stated()) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_each_row_of_the_table_is_what_runs(name: str, tmp_path: Path) -> None:
    kind, run = ROWS[name]
    row = run(tmp_path)
    if os.environ.get("PELLUCID_WRITE_TABLE"):
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(text.replace(stated()[name], row.line(name, kind)), encoding="utf-8")
    *cells, difference = (cell.strip() for cell in stated()[name].strip("|").split("|"))
    *measured, _ = (cell.strip() for cell in row.line(name, kind).strip("|").split("|"))
    assert cells == measured
    assert row.difference <= float(difference) <= WORST
