"""`pellucid export --to gguf`: what is written is read back equal by us, by `gguf` and by transformers; what has no place
there is refused by the field's name."""

import dataclasses
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import ours_of, random_model, unpermuted
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pellucid.checkpoint.gguf_export import export_gguf
from pellucid.checkpoint.gguf_import import import_gguf
from pellucid.checkpoint.model_folder import load_model, save_model
from pellucid.cli import main
from pellucid.inference import SamplingParams, generate
from pellucid.model import Transformer
from pellucid.model.rope import inverse_frequencies
from pellucid.text import encode_prompt
from pellucid.tokenizer import Tokenizer, train_bpe

TOKENS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
TEXTS = [
    f"the {a} asked the {b} for tea at {n}" for a in ("fox", "hen", "owl") for b in ("cat", "dog") for n in range(9)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 300)


def saved(folder: Path, tokenizer: Tokenizer | None = None, **changes: Any) -> Transformer:
    model = random_model(**changes)
    save_model(folder, model, tokenizer)
    return model


def there_and_back(folder: Path, kind: str, **options: Any) -> Any:
    path, back = folder.with_suffix(".gguf"), folder.with_name("back")
    export_gguf(folder, path, kind=kind)
    import_gguf(path, back, **options)
    return load_model(back)


# -- there and back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "head_dim": 24},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
        {"rope_theta": 500_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 77},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8,
                          "beta_slow": 2}},
        {"rope_scaling": LLAMA3},
        {"sliding_window": 7, "max_window_layers": 2},
    ],
    ids=str,
)  # fmt: skip
def test_float32_comes_back_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path / "m", **changes)
    loaded = there_and_back(tmp_path / "m", "f32")
    plain = {"sliding_window": None, "max_window_layers": 0}  # all layers were full: no window
    assert loaded.config == dataclasses.replace(model.config, **plain)
    expected = dict(model.named_parameters())
    assert len(dict(loaded.model.named_parameters())) == len(expected)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    with torch.no_grad():
        assert torch.equal(loaded.model(TOKENS).logits, model(TOKENS).logits)


def test_ntk_scaling_comes_back_as_the_base_that_it_amounts_to(tmp_path: Path) -> None:
    model = saved(tmp_path / "m", rope_scaling={"rope_type": "ntk", "factor": 3.0})
    loaded = there_and_back(tmp_path / "m", "f32")
    assert loaded.config.rope_scaling is None
    torch.testing.assert_close(inverse_frequencies(loaded.config), inverse_frequencies(model.config))


def test_float16_comes_back_within_half_precision(tmp_path: Path) -> None:
    model = saved(tmp_path / "m", attention_bias=True)
    for name, parameter in there_and_back(tmp_path / "m", "f16").model.named_parameters():
        expected = model.get_parameter(name)
        assert torch.equal(parameter, expected.half().float() if expected.dim() == 2 else expected), name


def test_q8_0_comes_back_within_its_block_error(tmp_path: Path) -> None:
    model = saved(tmp_path / "m", attention_bias=True, tie_word_embeddings=False)
    moved = 0
    for name, parameter in there_and_back(tmp_path / "m", "q8_0").model.named_parameters():
        expected = model.get_parameter(name).detach()
        if expected.dim() == 1:
            assert torch.equal(parameter, expected), name
            continue
        blocks, got = expected.view(-1, 32), parameter.detach().view(-1, 32)
        step = blocks.abs().amax(dim=1, keepdim=True) / 127
        assert bool(((blocks - got).abs() <= step * (0.5 + 127 * 2**-10)).all()), (
            name
        )  # rounding, and a half-precision scale
        moved += int((blocks != got).sum())
    assert moved > 1000


def test_rows_that_no_blocks_fill_become_float16(tmp_path: Path) -> None:
    model = saved(tmp_path / "m", intermediate_size=100)
    export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16" and types["blk.0.ffn_up.weight"] == "Q8_0"
    assert types["blk.0.ffn_norm.weight"] == "F32"
    import_gguf(tmp_path / "m.gguf", tmp_path / "back")
    got = load_model(tmp_path / "back").model.get_parameter("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(got, model.get_parameter("model.layers.0.mlp.down_proj.weight").half().float())


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_a_bfloat16_model_is_exported_from_its_own_values(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "m")
    assert main(["export", str(tmp_path / "m"), "--out", str(tmp_path / "b"), "--dtype", "bfloat16"]) == 0
    loaded = there_and_back(tmp_path / "b", kind)
    got = loaded.model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    expected = model.get_parameter("model.layers.1.self_attn.k_proj.weight").bfloat16().float()
    assert kind != "f32" or torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=0, atol={"f32": 0, "f16": 1e-3, "q8_0": 5e-3}[kind])


# -- others read it -------------------------------------------------------------------------------------------


def test_the_gguf_package_and_transformers_read_what_is_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = saved(
        tmp_path / "m", tokenizer, vocab_size=tokenizer.vocab_size, num_attention_heads=8, num_key_value_heads=2
    )
    export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for tensor in reader.tensors:
        weight = np.array(tensor.data)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = unpermuted(weight, 8 if ".attn_q." in tensor.name else 2)
        assert np.array_equal(weight, model.get_parameter(ours_of(tensor.name)).detach().numpy()), tensor.name
    assert len(reader.tensors) == len(list(model.named_parameters()))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama" and fields["general.name"] == "m"
    assert fields["llama.attention.head_count_kv"] == 2 and fields["llama.rope.dimension_count"] == 8
    assert fields["tokenizer.ggml.tokens"][:2] == ["<|endoftext|>", "<|im_start|>"]
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
        assert logits.std() > 0.5
        torch.testing.assert_close(theirs(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)


def test_llama_cpp_continues_text_as_we_do(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Greedy text of a random model, whose next token depends on every weight and on every token before."""
    program = shutil.which("llama-cli")
    if program is None and importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("llama.cpp is not here: neither llama-cli on the path nor the package xllamacpp")
    shape = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64, "hidden_size": 64, "head_dim": 32}
    model = saved(tmp_path / "m", tokenizer, **shape, rope_scaling=LLAMA3, tie_word_embeddings=False)
    path, prompt = tmp_path / "m.gguf", "the fox asked 12 hens"
    export_gguf(tmp_path / "m", path, kind="f32")
    (result,) = generate(model, [encode_prompt(tokenizer, prompt)], SamplingParams(temperature=0, max_tokens=24))
    expected = tokenizer.decode(result.ids)
    assert len(set(result.ids)) > 8
    if program is not None:
        arguments = ["-m", str(path), "-p", prompt, "-n", "24", "--temp", "0", "-no-cnv", "--no-display-prompt"]
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout.strip().startswith(expected.strip())
    else:
        assert llama_cpp_text(path, prompt, 24) == expected


def llama_cpp_text(path: Path, prompt: str, num_tokens: int) -> str:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers, params.warmup, params.n_parallel = str(path), 64, 0, False, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    request = {
        "prompt": prompt, "n_predict": num_tokens, "temperature": 0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True,
    }  # fmt: skip
    answer = xllamacpp.Server(params).handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    return str(answer["choices"][0]["text"])


# -- tokenizers -----------------------------------------------------------------------------------------------


def test_the_tokenizer_goes_along(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Also where the embedding has more rows than there are tokens."""
    saved(tmp_path / "m", tokenizer, vocab_size=tokenizer.vocab_size + 5)
    loaded = there_and_back(tmp_path / "m", "q8_0")
    text = "The fox  asked 123 cats?\n\nSchön 👋🏽 <|im_end|>"
    assert loaded.tokenizer.encode(text) == tokenizer.encode(text)
    assert loaded.tokenizer.encode_document(text) == tokenizer.encode_document(text)
    messages = [{"role": "user", "content": text}]
    assert loaded.tokenizer.encode_chat(messages) == tokenizer.encode_chat(messages)
    assert loaded.tokenizer.stop_ids == tokenizer.stop_ids
    assert loaded.config.vocab_size == tokenizer.vocab_size + 5


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "m", tokenizer, vocab_size=64)
    assert f"the tokenizer has {tokenizer.vocab_size} ids and the model's embedding 64 rows" in refused(
        capsys, tmp_path / "m"
    )


# -- what is refused ------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> str:
    """The message of an export that ends with exit code 2 and leaves nothing."""
    assert main(["export", str(folder), "--to", "gguf", "--out", str(folder.parent / "x.gguf"), *flags]) == 2
    assert not list(folder.parent.glob("x.gguf*"))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"qk_norm": True}, "model.qk_norm True"),
        ({"attention_gate": True}, "model.attention_gate True"),
        ({"sliding_window": 7}, "model.sliding_window 7"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "model.rope_scaling {'rope_type': 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "model.rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3}}, "model.rope_scaling"),
    ],
)
def test_fields_without_a_place_are_named(
    changes: dict[str, Any], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "m", **changes)
    assert f"the llama architecture of GGUF has no place for {field}" in refused(capsys, tmp_path / "m")


def test_values_that_a_type_cannot_hold_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = 1e6
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    assert f"{name} holds values that f16 cannot hold" in refused(capsys, tmp_path / "m", "--type", "f16")
    assert (
        main(["export", str(tmp_path / "m"), "--to", "gguf", "--type", "f32", "--out", str(tmp_path / "y.gguf")]) == 0
    )
    tensors[name][3, 4] = torch.nan
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    assert f"{name} holds values that q8_0 cannot hold" in refused(capsys, tmp_path / "m", "--type", "q8_0")


def test_flags_of_the_other_kind_and_files_in_use_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "m")
    assert "--dtype bfloat16 is for a model folder" in refused(capsys, tmp_path / "m", "--dtype", "bfloat16")
    assert main(["export", str(tmp_path / "m"), "--out", str(tmp_path / "n"), "--type", "f16"]) == 2
    assert "--type f16 is for --to gguf" in capsys.readouterr().err
    (tmp_path / "mine.gguf").write_text("mine")
    assert main(["export", str(tmp_path / "m"), "--to", "gguf", "--out", str(tmp_path / "mine.gguf")]) == 2
    assert "exists; give another --out" in capsys.readouterr().err and (tmp_path / "mine.gguf").read_text() == "mine"
    assert "no such model" in refused(capsys, tmp_path / "nowhere")


def test_the_command_writes_half_precision_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "m")
    assert main(["export", str(tmp_path / "m"), "--to", "gguf", "--out", str(tmp_path / "new" / "m.gguf")]) == 0
    assert "f16, " in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["m.gguf"]
    reader = gguf.GGUFReader(tmp_path / "new" / "m.gguf")
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F16", "F32"}
    assert reader.fields["general.file_type"].contents() == 1


def test_a_disk_that_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "m")

    def full(self: Any, data: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    assert main(["export", str(tmp_path / "m"), "--to", "gguf", "--out", str(tmp_path / "x.gguf")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
