"""Weights of 8 and 4 bits: what is stored is near what was there, and what is computed is what is stored."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from support import TINY, windows
from torch import Tensor, nn

from pellucid import kernels, load_model, save_model
from pellucid.checkpoint.adapter import save_adapter
from pellucid.config import LoraConfig, ModelConfig, run_config
from pellucid.errors import CheckpointError, ConfigError
from pellucid.inference import SamplingParams, generate
from pellucid.model import Transformer
from pellucid.model.linear import Linear
from pellucid.model.lora import add_lora, merge
from pellucid.model.quantize import (
    GROUP,
    BFloat16Linear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    has_bfloat16,
    is_quantized,
    memory_bytes,
    quantize_,
    to_int4,
    to_int8,
)
from pellucid.train import Trainer

KINDS: dict[str, type[PackedLinear]] = {"int8": Int8Linear, "int4": Int4Linear}
PACKED = {**KINDS, "bf16": BFloat16Linear}
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 on this processor"
)
TOKENS = torch.arange(24).view(2, 12) * 7 % 61
MIXTURE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module", params=["kernels of our own", "torch's kernels"])
def whose(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "torch's kernels":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "available", lambda: False)
            yield
    else:
        if not kernels.available():
            pytest.skip(f"no kernels: {kernels.missing()}")
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small(**changes: Any) -> Transformer:
    """Answers depend on the prompt: the weights are ten times as large as at the start of training."""
    config = ModelConfig(**(TINY | {"initializer_range": 0.2} | changes))
    return Transformer(config, generator=torch.Generator().manual_seed(1)).eval()


def int8_values(weight: Tensor) -> Tensor:
    levels, scale = to_int8(weight)
    return levels.double() * scale.double()[:, None]


def int4_values(weight: Tensor) -> Tensor:
    levels, scale_zero = to_int4(weight)
    scale, zero = scale_zero.double().repeat_interleave(GROUP, 0).permute(2, 1, 0)
    return ((levels - 8) * scale + zero)[:, : weight.shape[1]]


VALUES: dict[str, Callable[[Tensor], Tensor]] = {"int8": int8_values, "int4": int4_values}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (33, 47), (1, 1), (16, 33), (50, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_packed_product_is_that_of_the_stored_values(
    kind: str, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight, bias, x = drawn(outputs, inputs), drawn(outputs, seed=1), drawn(2, 3, inputs, seed=2).to(dtype)
    out = KINDS[kind](weight, bias)(x)
    stored, rows = VALUES[kind](weight), x.bfloat16().double()
    exact = F.linear(rows, stored, bias.double())
    assert out.dtype == dtype and out.shape == exact.shape
    room = F.linear(rows.abs(), stored.abs(), bias.abs().double()) * 2**-8  # of bfloat16, in the product and in the sum
    assert ((out.double() - exact).abs() <= room + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    layer, x = KINDS[kind](drawn(96, 160)), drawn(16, 160, seed=1)
    whole = layer(x)
    for rows in (1, 2, 4, 16):
        assert torch.equal(torch.cat([layer(part) for part in x.split(rows)]), whole), rows


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_an_answer_without_rows(kind: str) -> None:
    assert KINDS[kind](drawn(5, 32))(torch.zeros(0, 32)).shape == (0, 5)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_rounding_is_off_by_half_a_step_at_most(data: st.DataObject) -> None:
    outputs, inputs = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    spread, offset = 10.0 ** data.draw(st.integers(-6, 3)), 10.0 ** data.draw(st.integers(-6, 3))
    weight = drawn(outputs, inputs, seed=data.draw(st.integers(0, 2**31))) * spread + offset
    levels, scale = to_int8(weight)
    assert levels.abs().max() <= 127
    assert ((int8_values(weight) - weight).abs() <= scale.double()[:, None] * 0.5001).all()
    levels, scale_zero = to_int4(weight)
    assert levels.min() >= 0 and levels.max() <= 15
    step, zero = scale_zero.double().repeat_interleave(GROUP, 0).permute(2, 1, 0)[..., :inputs]
    assert ((int4_values(weight) - weight).abs() <= torch.maximum(step * 0.5001, zero.abs() / 256)).all()


def test_what_fits_into_the_levels_is_stored_as_it_is() -> None:
    levels = torch.arange(64).view(2, 32) % 16 - 8.0
    for weight in (torch.zeros(3, 64), torch.full((3, 64), -0.75), levels * 0.25 + 0.5):
        assert torch.equal(int4_values(weight), weight.double())
    eighths = torch.arange(-127, 128.0)[None] / 8
    assert torch.equal(int8_values(eighths), eighths.double())
    assert torch.equal(int8_values(torch.zeros(3, 5)), torch.zeros(3, 5).double())


def test_groups_do_not_disturb_each_other() -> None:
    weight = drawn(4, 96)
    louder = weight.clone()
    louder[:, :32] *= 1000
    assert torch.equal(int4_values(louder)[:, 32:], int4_values(weight)[:, 32:])
    assert not torch.equal(int4_values(louder)[:, :32], int4_values(weight)[:, :32])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, pytest.param("bf16", marks=needs_bfloat16)])
def test_every_linear_layer_is_packed_and_those_that_read_the_same_input_are_one(kind: str, tied: bool) -> None:
    model = small(tie_word_embeddings=tied, attention_bias=True)
    expected = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)} | {"lm_head"}
    assert set(quantize_(model, kind)) == expected
    layers = {f"model.layers.{i}.{name}" for i in range(2) for name in (
        "self_attn.joined", "self_attn.o_proj", "mlp.joined", "mlp.down_proj")}  # fmt: skip
    assert {name for name, m in model.named_modules() if isinstance(m, PackedLinear)} == layers | {"lm_head"}
    assert isinstance(model.model.layers[0].mlp.down_proj, PACKED[kind])
    assert isinstance(
        model.lm_head, BFloat16Linear if kind == "bf16" or (has_bfloat16() and not kernels.available()) else Int8Linear
    )
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert not any(p.requires_grad for p in model.parameters())


@needs_bfloat16
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "qk_norm": True, "mlp_bias": True}, MIXTURE])
def test_packed_bfloat16_gives_the_bits_of_plain_bfloat16(changes: dict[str, Any]) -> None:
    plain, model = small(**changes).bfloat16(), small(**changes).bfloat16()
    quantize_(model, "bf16")
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert memory_bytes(model) > 0.9 * memory_bytes(plain)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_large_layer_of_16_bits_rounds_a_row_alone_as_among_others(rows: int) -> None:
    layer, x = BFloat16Linear(drawn(1024, 3072)), drawn(16, 3072, seed=1).bfloat16()
    assert torch.equal(layer(x[:rows]), layer(x)[:rows])


def test_routers_and_the_latents_matrix_stay() -> None:
    plain, model = small(**MIXTURE), small(**MIXTURE)
    replaced = quantize_(model, "int8")
    assert {"mlp.experts.3.up_proj", "mlp.shared_experts.down_proj", "self_attn.q_proj"} <= {n[15:] for n in replaced}
    assert not any(name.endswith((".gate", "kv_b_proj")) for name in replaced)
    assert type(model.model.layers[0].self_attn.kv_b_proj) is Linear  # type: ignore[union-attr]
    assert model.kv_specs() == plain.kv_specs() and model.kv_specs()[0].value_in_key
    with torch.no_grad():
        exact, out = plain(TOKENS), model(TOKENS)
    assert 0 < (out.logits - exact.logits).abs().max() < 0.1 * exact.logits.abs().max()
    [result] = generate(model, [TOKENS[0].tolist()], SamplingParams(temperature=0, max_tokens=4))
    assert len(result.ids) == 4


def is_continued_as_by_whole_forwards(model: Transformer) -> bool:
    prompt = [3, 1, 4, 1, 5]
    [result] = generate(model, [prompt], SamplingParams(temperature=0, max_tokens=6))
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return len(set(result.ids)) > 1 and result.ids == ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache_gives_the_whole_forwards_tokens(kind: str) -> None:
    model = small()
    quantize_(model, kind)
    assert is_continued_as_by_whole_forwards(model)


@torch.no_grad()
def loss(model: Transformer, tokens: Tensor) -> float:
    return F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).item()


def test_a_trained_models_loss_rises_by_little() -> None:
    model, tokens = small(hidden_size=64, intermediate_size=96, initializer_range=0.02), TOKENS
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(30):
        out = model(tokens[:, :-1]).logits
        F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    before, weights = loss(model, tokens), {name: p.detach().clone() for name, p in model.named_parameters()}
    assert before < 1
    for kind, room in (("int8", 0.005), ("int4", 0.05)):
        other = small(hidden_size=64, intermediate_size=96)
        other.load_state_dict(weights, strict=False)
        quantize_(other, kind)
        assert 0 < abs(loss(other, tokens) - before) < room, kind


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 5)])
def test_weights_take_8_and_5_bits(kind: str, bits: int) -> None:
    weight = drawn(256, 512)
    layer = KINDS[kind](weight)
    extra = 256 * (2 if layer.weights is None else 4) if kind == "int8" else 0  # a scale for each output
    assert memory_bytes(layer) == weight.numel() * bits // 8 + extra
    assert not list(layer.parameters()) and "weight" not in layer.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_loaded_so_and_holds_nothing_else(kind: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 192, "tie_word_embeddings": True}
    save_model(tmp_path / "model", small(**shape))
    plain = load_model(tmp_path / "model", device="cpu").model
    loaded = load_model(tmp_path / "model", device="cpu", weights=kind).model
    by_hand = small(**shape)
    quantize_(by_hand, kind)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, by_hand(TOKENS).logits)
        assert not torch.equal(loaded(TOKENS).logits, plain(TOKENS).logits)
    assert memory_bytes(loaded) < memory_bytes(plain) * 0.5
    del plain, by_hand
    gc.collect()
    table = loaded.model.embed_tokens.weight
    assert table.untyped_storage().nbytes() == table.nbytes


LOADS = """
import re, sys
from pathlib import Path
from pellucid import load_model
load_model(sys.argv[1], device="cpu", weights=sys.argv[3])  # everything that is imported on the way
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
kilobytes = lambda name: int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = kilobytes("VmRSS")
load_model(sys.argv[2], device="cpu", weights=sys.argv[3])
print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a mapped file is let go on Linux")
@pytest.mark.parametrize("kind", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_model_is_never_in_memory_both_whole_and_packed(kind: str, tmp_path: Path) -> None:
    save_model(tmp_path / "tiny", small())
    large = small(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8)
    save_model(tmp_path / "large", large)
    command = [sys.executable, "-c", LOADS, str(tmp_path / "tiny"), str(tmp_path / "large"), kind]
    env = os.environ | ({} if kernels.available() else {"PELLUCID_KERNELS": "off"})
    grew = int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    # 1.4 of the size where the whole file stays
    assert 0 < grew < 0.9 * sum(p.nbytes for p in large.parameters())


def test_the_other_weights_have_the_dtype_asked_for(tmp_path: Path) -> None:
    save_model(tmp_path / "model", small(attention_bias=True))
    whole = load_model(tmp_path / "model", device="cpu", weights="int8").model
    half = load_model(tmp_path / "model", device="cpu", dtype="bfloat16", weights="int8").model
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    one, other = whole.model.layers[0].self_attn.joined, half.model.layers[0].self_attn.joined  # type: ignore[union-attr]
    assert isinstance(one, Int8Linear) and isinstance(other, Int8Linear)
    for name in ("packed", "scale") if one.weights is None else ("packed", "scales"):  # of what is stored
        assert torch.equal(*(getattr(layer.weights or layer, name) for layer in (one, other)))
    assert other.bias is not None and other.bias.dtype == torch.bfloat16
    with torch.no_grad():
        assert half(TOKENS).logits.dtype == torch.bfloat16
        assert (half(TOKENS).logits - whole(TOKENS).logits).abs().max() < 0.2


def test_a_merged_adapter_goes_into_the_weights_and_another_is_refused(tmp_path: Path) -> None:
    model = small()
    add_lora(model, LoraConfig(r=2, alpha=4.0, targets=("q_proj", "down_proj")))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.weight"):
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    with pytest.raises(ConfigError, match=r"adapter that is not merged; call merge\(model\)"):
        quantize_(model, "int8")
    assert not is_quantized(model)
    merge(model)
    with torch.no_grad():
        merged, bare = model(TOKENS).logits, small()(TOKENS).logits
        assert "model.layers.0.self_attn.q_proj" in quantize_(model, "int8")
        assert not any("lora" in name for name, _ in model.named_modules())
        assert (model(TOKENS).logits - merged).abs().max() < 0.2 * (bare - merged).abs().max()


def test_an_adapters_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    save_model(tmp_path / "base", small())
    model = load_model(tmp_path / "base", device="cpu").model
    add_lora(model, LoraConfig(r=2, alpha=4.0, targets=("q_proj",)))
    save_adapter(tmp_path / "adapter", model, base=str(tmp_path / "base"))
    with pytest.raises(ConfigError, match=r"pellucid export .*adapter --out MODEL"):
        load_model(tmp_path / "adapter", device="cpu", weights="int8")


def test_a_quantised_model_is_neither_saved_nor_trained_nor_quantised_again(tmp_path: Path) -> None:
    model = small()
    quantize_(model, "int8")
    with pytest.raises(ConfigError, match="not to be saved; load it without weights"):
        save_model(tmp_path / "model", model)
    assert not (tmp_path / "model").exists()
    with pytest.raises(ConfigError, match="not to be quantised"):
        quantize_(model, "int4")
    with pytest.raises(ConfigError, match="not to be trained"):
        Trainer(run_config({"train": {"steps": 1}}), model=model, train_data=windows())


def test_a_processor_that_oneDNN_packs_no_bfloat16_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(
        ConfigError, match=r'weights "bf16" are packed for processors with .*; leave weights out .* or take int8'
    ):
        quantize_(small().bfloat16(), "bf16")


def test_errors_name_the_value_and_what_is_known(tmp_path: Path) -> None:
    save_model(tmp_path / "model", small())
    with pytest.raises(ConfigError, match="weights 'int3' are unknown; known: bf16, int8, int4"):
        load_model(tmp_path / "model", device="cpu", weights="int3")
    with pytest.raises(ConfigError, match='weights "int8" run on cpu, and the model\'s device is meta'):
        quantize_(Transformer(ModelConfig(**TINY), device="meta"), "int8")
    model = small()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = float("inf")  # type: ignore[union-attr,index]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values that are not finite"):
        quantize_(model, "int4")
