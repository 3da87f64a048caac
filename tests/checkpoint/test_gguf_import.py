"""`pellucid import` of GGUF files: weights to the bit, the model that they make, and what is refused."""

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    DEQUANTISED,
    Q,
    keys_of,
    ours_of,
    peak_memory,
    random_model,
    tensors_of,
    unpermuted,
    write,
    write_model,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from pellucid.checkpoint import files
from pellucid.checkpoint.gguf_import import import_gguf
from pellucid.checkpoint.model_folder import load_model
from pellucid.cli import main
from pellucid.config import ModelConfig
from pellucid.errors import PellucidError, StorageError

TOKENS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))


def imported(path: Path, **options: Any) -> Any:
    out = path.with_suffix("")
    import_gguf(path, out, **options)
    return load_model(out)


def refused(capsys: pytest.CaptureFixture[str], path: Path, *flags: str) -> str:
    """The message of an import that ends with exit code 2 and leaves nothing."""
    out = path.parent / "refused"
    assert main(["import", str(path), "--out", str(out), *flags]) == 2
    assert not list(path.parent.glob("refused*"))
    return capsys.readouterr().err


# -- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", DEQUANTISED, ids=lambda type_: type_.name)
def test_every_type_that_the_package_dequantises_comes_out_to_the_bit(type_: Any, tmp_path: Path) -> None:
    model = random_model(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    tensors = tensors_of(model)
    block, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            shape = (len(tensor), tensor.shape[1] // block * size)
            data = rng.integers(0, 256, shape, dtype=np.uint8) & 0x3F  # no scale in it is infinite or NaN
            tensors[name] = (data if block > 1 or size == 2 else data.view(np.float32), type_)
            if type_ == Q.F16:
                tensors[name] = (data.view(np.float16), None)
            elif type_ == Q.F32:
                tensors[name] = (data.view(np.float32), None)
    path = write(tmp_path / "m.gguf", keys_of(model.config), tensors)
    loaded = dict(imported(path).model.named_parameters())
    assert len(loaded) == len(tensors)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type).reshape(tensor.shape[::-1])
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            expected = unpermuted(expected, 4 if ".attn_q." in tensor.name else 2)
        got = loaded[ours_of(tensor.name)].detach().numpy()
        assert np.array_equal(got, expected), tensor.name
        assert got.std() > 0


@pytest.mark.parametrize("type_", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=lambda t: t.name)
def test_logits_are_those_of_transformers_reading_the_same_file(type_: Any, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", random_model(), type_=type_)
    ours = imported(path).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    with torch.no_grad():
        logits = ours(TOKENS).logits
        assert logits.std() > 0.5
        torch.testing.assert_close(logits, theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, again(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"head_dim": 24},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
        {"rope_theta": 500_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 77},
    ],
    ids=str,
)
def test_every_shape_of_a_llama_comes_back_to_the_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(**changes)
    loaded = imported(write_model(tmp_path / "m.gguf", model))
    assert loaded.config == model.config
    expected = dict(model.named_parameters())
    assert loaded.model.num_parameters() == model.num_parameters()
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_quantised_vectors_are_permuted_by_element_and_not_by_byte(tmp_path: Path) -> None:
    model = random_model(attention_bias=True)
    tensors: dict[str, Any] = tensors_of(model)
    bias = tensors["blk.0.attn_q.bias"]
    tensors["blk.0.attn_q.bias"] = (gguf.quants.quantize(bias[None], Q.Q8_0)[0], Q.Q8_0)
    loaded = imported(write(tmp_path / "m.gguf", keys_of(model.config), tensors))
    got = loaded.model.get_parameter("model.layers.0.self_attn.q_proj.bias")
    torch.testing.assert_close(got, model.get_parameter("model.layers.0.self_attn.q_proj.bias"), rtol=0, atol=0.01)


def test_weights_are_written_in_bfloat16_when_asked(tmp_path: Path) -> None:
    model = random_model()
    loaded = imported(write_model(tmp_path / "m.gguf", model), dtype="bfloat16")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16()), name


def test_keys_that_may_be_left_out_take_the_values_of_llama_cpp(tmp_path: Path) -> None:
    model = random_model(num_key_value_heads=4, rope_theta=10_000.0)
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
              "rope.dimension_count", "vocab_size")  # fmt: skip
    keys: dict[str, Any] = {f"llama.{key}": None for key in absent} | {"llama.attention.head_count": [4, 4]}
    assert imported(write_model(tmp_path / "m.gguf", model, keys)).config == model.config


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_near_the_largest_tensor(tmp_path: Path) -> None:
    """60 MB of float32 in 24 layers: never in memory at once."""
    model = random_model(num_hidden_layers=24, hidden_size=256, intermediate_size=512)
    size = 4 * model.num_parameters()
    path = write_model(tmp_path / "m.gguf", model, type_=Q.Q8_0)
    small = write_model(tmp_path / "small.gguf", random_model(), type_=Q.Q8_0)
    before, after = peak_memory(
        "from pellucid.checkpoint.gguf_import import import_gguf\n"
        f"import_gguf({str(small)!r}, {str(tmp_path / 'first')!r})\n# --\n"  # all that is imported on the way
        f"import_gguf({str(path)!r}, {str(tmp_path / 'out')!r})"
    )
    assert size > 40e6 and (tmp_path / "out" / "model.safetensors").stat().st_size >= size
    assert after - before < size / 2


# -- rotary scaling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"rope.scale_linear": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
             "rope.scaling.finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_beta_fast": 8.0,
             "rope.scaling.yarn_beta_slow": 2.0},
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8.0, "beta_slow": 2.0},
        ),
    ],
)  # fmt: skip
def test_rope_scaling_keys_become_ours(keys: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", random_model(), {f"llama.{key}": value for key, value in keys.items()})
    assert imported(path).config.rope_scaling == scaling


def llama3_factors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What converters write as rope_freqs.weight: by wavelengths, as Llama 3.1 was released."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "low", "high", "original"),
    [
        (128, 500_000.0, 8.0, 1.0, 4.0, 8192),
        (64, 500_000.0, 32.0, 1.0, 4.0, 8192),
        (64, 10_000.0, 4.0, 1.0, 6.0, 512),
        (16, 500_000.0, 8.0, 1.0, 4.0, 8192),
    ],
)
def test_the_frequency_factors_of_llama_3_become_its_scaling(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int, tmp_path: Path
) -> None:
    model = random_model(num_attention_heads=2, head_dim=head_dim, rope_theta=theta, num_hidden_layers=1)
    factors = llama3_factors(head_dim, theta, factor, low, high, original)
    assert len(np.unique(factors)) > 1, "or nothing is tested"
    tensors = {"rope_freqs.weight": factors} | tensors_of(model)
    scaling = imported(write(tmp_path / "m.gguf", keys_of(model.config), tensors)).config.rope_scaling
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def test_factors_that_do_nothing_are_no_scaling(tmp_path: Path) -> None:
    model = random_model()
    tensors = {"rope_freqs.weight": np.ones(8, dtype=np.float32)} | tensors_of(model)
    assert imported(write(tmp_path / "m.gguf", keys_of(model.config), tensors)).config.rope_scaling is None


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.block_count": 3}, "missing blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "unexpected blk.1.attn_norm.weight"),
        ({"llama.block_count": 4_000_000_000}, "llama.block_count is 4000000000, and there are 20 tensors"),
        ({"llama.embedding_length": 128, "llama.attention.key_length": 16}, "token_embd.weight has shape (64, 64)"),
        (
            {"llama.feed_forward_length": 100},
            "blk.0.ffn_gate.weight has shape (96, 64), the keys of the file say (100, 64)",
        ),
        ({"llama.attention.head_count": 3}, "num_attention_heads 3 is not divisible by"),
        (
            {"llama.attention.head_count_kv": [2, 1]},
            "llama.attention.head_count_kv is [2, 1]; one number for all layers",
        ),
        (
            {"llama.attention.key_length": 40_000},
            "blk.0.attn_q.weight has shape (64, 64), the keys of the file say (160",
        ),
        ({"llama.attention.key_length": 4_000_000_000}, "model.head_dim must be at most 65,536"),
        ({"llama.rope.freq_base": "high"}, "llama.rope.freq_base is 'high'"),
        ({"llama.rope.scaling.factor": "far"}, "model.rope_scaling.factor must be a number"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "tokenizer.ggml.model is ['gpt2']"),
        ({"llama.attention.head_count": "four"}, "llama.attention.head_count is 'four'"),
        (
            {"llama.attention.value_length": 8},
            "llama.attention.value_length is 8, but llama.attention.key_length is 16",
        ),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama.vocab_size": 65}, "llama.vocab_size is 65, but the number of rows of token_embd.weight is 64"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "rms_norm_eps must be positive"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, "llama.rope.scaling.factor is 2.0"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor is 1.5"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8; only 0 is supported"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.logit_scale": 2.0}, "the key llama.logit_scale (2.0) is none that we can honour"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"split.count": 3}, "one of 3 parts (split.count)"),
        ({"pellucid.rope_scaling": "[]", "llama.rope.scaling.factor": None}, None),
    ],
    ids=str,
)
def test_keys_that_contradict_or_mean_what_we_cannot_do_are_refused(
    keys: dict[str, Any], words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "m.gguf", random_model(), keys)
    if words is None:  # a note about a tensor that is not there says nothing
        assert imported(path).config.rope_scaling is None
        return
    message = refused(capsys, path)
    assert words in message and "m.gguf" in message


@pytest.mark.parametrize(
    ("factors", "keys", "words"),
    [
        (np.linspace(1, 3, 8), {}, "rope_freqs.weight is no scaling of Llama 3"),
        (np.full(8, np.nan), {}, "rope_freqs.weight holds values that are not finite"),
        (np.ones(7), {}, "rope_freqs.weight has shape (7,), not (8,)"),
        (np.full(8, 2.0), {"llama.rope.scaling.factor": 2.0}, "both llama.rope.scaling keys and rope_freqs.weight"),
        (np.full(8, 2.0), {"pellucid.rope_scaling": "nonsense"}, "pellucid.rope_scaling is 'nonsense'"),
        (
            np.full(8, 2.0),
            {"pellucid.rope_scaling": '{"rope_type": "linear", "factor": 3}'},
            "not the scaling in pellucid.rope_scaling",
        ),
        (np.full(8, 2.0), {"pellucid.rope_scaling": '{"rope_type": "bent"}'}, "model.rope_scaling.rope_type is 'bent'"),
    ],
)
def test_frequency_factors_that_no_scaling_gives_are_refused(
    factors: np.ndarray, keys: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model()
    tensors = {"rope_freqs.weight": factors.astype(np.float32)} | tensors_of(model)
    assert words in refused(capsys, write(tmp_path / "m.gguf", keys_of(model.config) | keys, tensors))


def test_missing_extra_and_partial_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model(attention_bias=True)
    tensors = tensors_of(model)
    for name in ("token_embd.weight", "blk.1.ffn_up.weight", "blk.0.attn_v.bias"):
        left = {key: value for key, value in tensors.items() if key != name}
        assert f"missing {name}" in refused(capsys, write(tmp_path / "m.gguf", keys_of(model.config), left))
    for name in ("blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "v.patch_embd.weight"):
        more = tensors | {name: np.ones(16, dtype=np.float32)}
        assert f"unexpected {name}" in refused(capsys, write(tmp_path / "m.gguf", keys_of(model.config), more))


def test_values_that_are_not_finite_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model()
    for type_ in (Q.F32, Q.F16):
        tensors = tensors_of(model)
        tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"].copy()
        tensors["blk.1.ffn_up.weight"][5, 7] = np.nan
        path = write(tmp_path / "m.gguf", keys_of(model.config), tensors, type_=type_)
        assert "blk.1.ffn_up.weight holds values that are not finite" in refused(capsys, path)


@pytest.mark.parametrize("type_", [Q.Q8_K, Q.I8, Q.Q8_1], ids=lambda type_: type_.name)
def test_types_that_the_package_cannot_dequantise_are_named(
    type_: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(hidden_size=256, num_hidden_layers=1)
    block, size = gguf.GGML_QUANT_SIZES[type_]
    tensors: dict[str, Any] = tensors_of(model)
    data = np.zeros((64, 256 // block * size), dtype=np.int8 if type_ == Q.I8 else np.uint8)
    tensors["token_embd.weight"] = (data, None if type_ == Q.I8 else type_)
    message = refused(capsys, write(tmp_path / "m.gguf", keys_of(model.config), tensors))
    assert f"token_embd.weight is of type {type_.name}, which the package gguf cannot dequantise" in message


def test_another_architecture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "m.gguf", random_model(), architecture="qwen2")
    assert "general.architecture is 'qwen2'; only 'llama'" in refused(capsys, path)


# -- the container --------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_model(tmp_path / "whole.gguf", random_model(num_hidden_layers=1)).read_bytes()
    path = tmp_path / "m.gguf"
    header = int(gguf.GGUFReader(tmp_path / "whole.gguf").data_offset)
    for size in [0, 3, 4, 7, 23, *range(24, header, 41), header, header + 1, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        message = refused(capsys, path)
        assert "m.gguf" in message and ("is cut" in message or size < 5), (size, message)
        assert size <= header or ".weight ends at byte" in message, "which tensor is cut"


def header(*, version: int = 3, tensors: list[bytes] = [], keys: list[bytes] = []) -> bytes:  # noqa: B006
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, dimensions: tuple[int, ...], type_: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, type_, offset)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04" + bytes(60), "is not a GGUF file"),
        (b"{}", "is not a GGUF file"),
        (b"", "is not a GGUF file"),
        (header(version=1), "is GGUF version 1: only 2 and 3 are read"),
        (header(version=0x03000000), "big-endian; only little-endian files are read"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "is cut: it ends inside the header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "is cut: it ends inside the header"),
        (header(keys=[text("a") + struct.pack("<II", 4, 1)] * 2), "has the key a twice"),
        (header(keys=[text("a") + struct.pack("<II", 99, 1)]), "a value of type 99 at the value of a"),
        (header(keys=[text("a") + struct.pack("<IIQ", 9, 9, 0)]), "a list of values of type 9 at the value of a"),
        (header(keys=[text("a") + struct.pack("<IIQ", 9, 4, 2**61)]), "it ends inside the value of a"),
        (header(keys=[text("a") + struct.pack("<IIQ", 9, 8, 2**61)]), "it ends inside the value of a"),
        (header(keys=[text("a") + struct.pack("<IQ", 8, 2**63)]), "it ends inside the value of a"),
        (header(keys=[text("a") + struct.pack("<IQ", 8, 1) + b"\xff"]), "text that is not UTF-8 at the value of a"),
        (header(keys=[text("general.alignment") + struct.pack("<II", 4, 24)]), "general.alignment 24"),
        (header(tensors=[entry("w", (1, 1, 1, 1, 1), 0)]), "w has 5 dimensions"),
        (header(tensors=[entry("w", (2**62, 0), 0)]) + bytes(64), "w has shape (0, 4611686018427387904)"),
        (header(tensors=[entry("w", (8,), 77)]) + bytes(64), "w in tensor type 77, which is unknown"),
        (header(tensors=[entry("w", (8,), 4)]) + bytes(64), "w in tensor type 4, which is unknown"),
        (header(tensors=[entry("w", (33,), 8)]) + bytes(64), "w in Q8_0 with rows of 33 elements"),
        (header(tensors=[entry("w", (2**62, 2**62), 0)]) + bytes(64), "is cut: w ends at byte"),
        (header(tensors=[entry("w", (8,), 0)] * 2) + bytes(96), "has the tensor w twice"),
        (
            header(tensors=[entry("v", (8,), 0), entry("w", (8,), 0, 16)]) + bytes(96),
            "has w in bytes that belong to v",
        ),
        (header(tensors=[entry("w", (8,), 0)]) + bytes(96), "general.architecture is None"),
    ],
)
def test_a_damaged_or_hostile_container_is_refused_before_anything_is_allocated(
    data: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert words in refused(capsys, path)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_with_any_bytes_changed_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    """Never another exception, and never memory that the file does not have."""
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        tokens = ["a", "b", "ab", *(f"t{i}" for i in range(61))]
        keys = {"tokens": tokens, "token_type": [1] * 64, "merges": ["a b"], "model": "gpt2", "pre": "gpt-2"}
        named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        write_model(whole, random_model(num_hidden_layers=1), {"llama.rope.scaling.factor": 2.0} | named)
    data, rng = bytearray(whole.read_bytes()), np.random.default_rng(seed)
    for place in rng.integers(4, 2400, rng.integers(1, 4)):
        data[place] = rng.choice([0, 1, 8, 9, 10, 127, 255, data[place] ^ (1 << rng.integers(8))])
    path, out = tmp_path / "m.gguf", tmp_path / f"out{seed}"
    path.write_bytes(data)
    try:
        import_gguf(path, out)
    except PellucidError as error:
        assert "m.gguf" in str(error) and not out.exists()


# -- the folder ----------------------------------------------------------------------------------------------


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"general.name": "Tiny", "general.license": "apache-2.0"}
    path = write_model(tmp_path / "m.gguf", random_model(), keys, type_=Q.Q4_0)
    assert main(["import", str(path), "--out", str(tmp_path / "a" / "m")]) == 0
    said = capsys.readouterr().out
    assert f"{random_model().num_parameters():,} parameters in float32" in said and "Q4_0" in said
    assert "the file has no tokenizer" in said
    card = (tmp_path / "a" / "m" / "README.md").read_text()
    assert "license: apache-2.0" in card and "Tiny" in card and "Trained" not in card
    assert {p.name for p in (tmp_path / "a" / "m").iterdir()} == {"config.json", "model.safetensors", "README.md"}


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "m.gguf", random_model())
    out = tmp_path / "out"
    out.mkdir()
    assert main(["import", str(path), "--out", str(out)]) == 0, "an empty one is fine"
    assert main(["import", str(path), "--out", str(out)]) == 2
    assert "exists; give another --out or remove it" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert main(["import", str(path), "--out", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_a_hugging_face_folder_is_opened_and_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(write_model(tmp_path / "m.gguf", random_model()))
    assert "every command opens it as it is" in refused(capsys, tmp_path / "m")
    assert "is a folder, no GGUF file" in refused(capsys, tmp_path)
    assert "no such file" in refused(capsys, tmp_path / "nowhere.gguf")


def test_a_file_says_what_it_holds_and_where_it_wants_to_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"general.name": "Tiny", "tokenizer.ggml.tokens": [f"token{i}" for i in range(64)]}
    path = write_model(tmp_path / "m.gguf", random_model(), keys, type_=Q.Q8_0, architecture="qwen2")
    assert main(["inspect", str(path), "--json"]) == 0, "of any architecture"
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "gguf" and facts["parameters"] == random_model().num_parameters()
    assert facts["parameters_by_type"].keys() == {"Q8_0", "F32"} and facts["tensors"] == 20
    assert facts["metadata"]["general.name"] == "Tiny" and facts["long_metadata"] == ["tokenizer.ggml.tokens"]
    assert main(["generate", str(path), "--prompt", "x"]) == 2
    assert f"pellucid import {path} --out MODEL" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["inspect", str(path)]) == 2
    assert "is cut: blk.1.ffn_down.weight ends at byte" in capsys.readouterr().err


def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", random_model())

    def full(name: str, where: Path) -> None:
        if name == "fsync" and where.name == "model.safetensors":
            raise StorageError(f"cannot write {where}: No space left on device")

    monkeypatch.setattr(files, "before_operation", full)
    assert main(["import", str(path), "--out", str(tmp_path / "out")]) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_without_the_package_the_message_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", random_model())
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert 'needs gguf: install it with pip install "pellucid[formats]"' in refused(capsys, path)


def test_a_config_of_ours_reads_as_the_file_says(tmp_path: Path) -> None:
    loaded = imported(write_model(tmp_path / "m.gguf", random_model()))
    assert isinstance(loaded.config, ModelConfig) and loaded.config.rms_norm_eps == 1e-5, "not 9.999999747378752e-06"
