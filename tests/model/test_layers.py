import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.model.layers import RMSNorm, linear_together
from pellucid.model.linear import Linear
from pellucid.model.rope import rotate


@pytest.mark.parametrize("shape", [(7, 16), (2, 5, 16), (2, 5, 3, 16)])
def test_the_norm_has_the_values_and_gradients_of_torchs(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(16, 1e-3)
    x = (torch.randn(shape, generator=g) * 0.1).requires_grad_()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(16, generator=g) + 0.5)
    upstream = torch.randn(shape, generator=g)
    results = []
    for function in (norm, lambda x: F.rms_norm(x, (16,), norm.weight, 1e-3)):
        out = function(x)
        results.append((out, *torch.autograd.grad(out, (x, norm.weight), upstream)))
    for ours, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_derivatives_written_by_hand_equal_finite_differences() -> None:
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(6, 1e-3).double()
    x = torch.randn(2, 3, 6, generator=g, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(norm, (x,))
    x = torch.randn(3, 2, 6, generator=g, requires_grad=True)
    angles, upstream = torch.rand(3, 1, 3, generator=g), torch.randn(3, 2, 6, generator=g)
    cos, sin = 1.5 * angles.cos().repeat(1, 1, 2), 1.5 * torch.cat([-angles.sin(), angles.sin()], -1)
    (grad,) = torch.autograd.grad(rotate(x, cos, sin), x, upstream)
    step = 0.5 * torch.randn(3, 2, 6, generator=g)  # a turn is linear, so any step is exact
    torch.testing.assert_close(
        (grad * step).sum(), ((rotate(x + step, cos, sin) - rotate(x, cos, sin)) * upstream).sum()
    )


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("error")
def test_a_bfloat16_norm_is_computed_in_float32(weight_dtype: torch.dtype) -> None:
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 300).bfloat16()
    out = RMSNorm(64, 1e-5).to(weight_dtype)(x)
    assert out.dtype == torch.bfloat16
    exact = F.rms_norm(x.double(), (64,), None, 1e-5)
    assert ((out - exact).abs() <= exact.abs() * 2**-8).all()  # one rounding


def test_linears_that_cannot_be_joined_are_called_one_by_one() -> None:
    class Tripled(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    x = torch.randn(5, 4)
    for pair in ((Linear(4, 2), Linear(4, 3, bias=False)), (Linear(4, 2), Tripled(4, 3))):
        for out, linear in zip(linear_together(x, pair, join=True), pair, strict=True):
            assert torch.equal(out, linear(x))
