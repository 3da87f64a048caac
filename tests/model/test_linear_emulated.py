"""Bfloat16 where it would be emulated, against float64 and torch's own bfloat16."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid import kernels
from pellucid.config import ModelConfig
from pellucid.inference import Engine, SamplingParams
from pellucid.model import Transformer
from pellucid.model import linear as module
from pellucid.model.attend import WindowAttend
from pellucid.model.linear import Linear, is_emulated

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.missing()}")


@pytest.fixture(autouse=True)
def emulating(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever this processor can."""
    monkeypatch.setattr(module, "_processor_emulates", lambda: True)
    yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(inputs: int, outputs: int, *, bias: bool = True) -> Linear:
    made = Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        made.weight.copy_(drawn(outputs, inputs, seed=1) * inputs**-0.5)
        if bias:
            made.bias.copy_(drawn(outputs, seed=2))
    return made


def gradients(made: Linear, x: Tensor, forward: object, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = forward(x)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, [x, *made.parameters()], grad.to(out.dtype))]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(32, 16, (1,)), (64, 33, (2, 7)), (96, 130, (40,))])
def test_outputs_and_gradients_are_rounded_once(
    inputs: int, outputs: int, rows: tuple[int, ...], bias: bool, autocast: bool
) -> None:
    made = layer(inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in made.parameters():  # numbers that bfloat16 has, so that only sums are rounded
            parameter.copy_(parameter.bfloat16())
    x, grad = drawn(*rows, inputs, seed=3).bfloat16().float(), drawn(*rows, outputs, seed=4).bfloat16()
    exact = gradients(made.double(), x.double(), made, grad)
    made = made.float() if autocast else made.bfloat16()
    with torch.autocast("cpu", BF16, enabled=autocast):
        ours = gradients(made, x if autocast else x.bfloat16(), made, grad)
    assert ours[0].dtype == BF16 and len(ours) == len(exact) == 3 + bias
    for found, wanted in zip(ours, exact, strict=True):
        assert found.dtype == (torch.float32 if autocast and found is not ours[0] else BF16)
        assert wanted.any() and found.shape == wanted.shape
        # what comes in is exact, so that float32 gradients are not rounded
        rounding = 2**-8 if found.dtype == BF16 else 1e-6
        assert ((found - wanted).abs() <= rounding * wanted.abs() + 1e-5).all()


def test_it_computes_nearly_what_torch_does() -> None:
    made, x = layer(576, 192), drawn(9, 576, seed=3)
    with torch.autocast("cpu", BF16):
        ours, torchs = made(x), F.linear(x, made.weight, made.bias)
    assert torchs.dtype == BF16 and not torch.equal(ours, torchs + 1)
    assert (ours.float() - torchs.float()).norm() < 4e-3 * torchs.float().norm()


def test_a_row_has_the_same_bits_in_any_number_of_rows() -> None:
    made, x = layer(576, 192).bfloat16(), drawn(50, 576, seed=3).bfloat16()
    whole = made(x)
    for a, b in ((0, 1), (7, 9), (3, 20), (11, 50)):
        assert torch.equal(made(x[a:b]), whole[a:b])


def test_what_is_not_trained_has_no_gradient() -> None:
    made, x = layer(32, 16).bfloat16(), drawn(3, 32).bfloat16().requires_grad_()
    made.weight.requires_grad_(False)
    made(x).sum().backward()
    assert x.grad is not None and x.grad.any() and made.weight.grad is None and made.bias.grad is not None


def test_everything_else_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = layer(32, 16), drawn(3, 32)
    assert is_emulated(x.bfloat16()) and not is_emulated(x) and not is_emulated(x.bfloat16().to("meta"))
    with torch.autocast("cpu", BF16):
        assert is_emulated(x) and not is_emulated(x.double())
    with torch.autocast("cpu", torch.float16):
        assert not is_emulated(x)
    monkeypatch.setattr(module._InFloat32, "apply", lambda *_: pytest.fail("not torch's"))
    assert torch.equal(made(x), F.linear(x, made.weight, made.bias))
    odd = layer(33, 16).bfloat16()  # widths that the kernel does not take
    assert torch.equal(odd(drawn(3, 33).bfloat16()), F.linear(drawn(3, 33).bfloat16(), odd.weight, odd.bias))
    with pytest.raises(RuntimeError, match="dtype"):
        made(x.bfloat16())  # float32 weights without autocast
    with module.as_elsewhere():
        assert not is_emulated(x.bfloat16())
    assert is_emulated(x.bfloat16())
    monkeypatch.setattr(module, "_processor_emulates", lambda: False)
    assert not is_emulated(x.bfloat16())


def test_an_engine_under_autocast_draws_what_it_draws_in_bfloat16() -> None:
    """As rollouts are: attention must not take the way out of emulation again and again."""
    config = ModelConfig(
        vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model, params = (
        Transformer(config, generator=torch.Generator().manual_seed(0)),
        SamplingParams(max_tokens=8, temperature=0),
    )
    for exact in (True, False):
        with torch.autocast("cpu", BF16):
            rough = Engine(model, kv_gb=0.001, page_size=16, exact=exact).generate([[1, 2, 3], [4, 5]], params)
        plain = Engine(model, kv_gb=0.001, page_size=16).generate([[1, 2, 3], [4, 5]], params)
        assert [len(r.ids) for r in rough] == [8, 8] and [r.ids[:1] for r in rough] == [r.ids[:1] for r in plain]


def test_attention_is_written_out_where_products_are_bfloat16s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (drawn(1, 9, heads, 16, seed=heads).bfloat16() for heads in (4, 2, 2))
    attend = WindowAttend((None,), written_out=True)
    ours = attend(0, q, k, v, scale=0.25)
    monkeypatch.setattr("pellucid.model.attend.explicit_attention", lambda *_: pytest.fail("emulated products"))
    assert torch.equal(ours, attend(0, q, k, v, scale=0.25)) and ours.dtype == BF16
    wide = WindowAttend((None,))(0, q.float(), k.float(), v.float(), scale=0.25)
    assert (ours - wide).abs().max() <= 2**-8 * wide.abs().max()


def test_the_shape_is_known_without_data() -> None:
    x, weight = (torch.empty(size, 64, dtype=BF16, device="meta") for size in (3, 20))
    out = torch.ops.pellucid.bfloat16_linear(x, weight, None)
    assert out.shape == (3, 20) and out.dtype == BF16
