"""The kernel of experts against a loop over tokens in float64 and autograd, in each way that it can be compiled."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from kernel_variants import VARIANTS, compiled, using

from pellucid.kernels.experts import disagreement, fits
from pellucid.model.experts import mix

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
CASES = {
    "few": (5, 16, 16, 3, 2),
    "several panels": (70, 32, 48, 4, 2),
    "as many as there are": (9, 16, 32, 4, 4),
    "many small": (40, 48, 16, 16, 3),
    "large": (150, 160, 112, 2, 1),
}
"""Tokens, width of the model, width inside, experts, experts a token."""


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    """Which library everything calls."""
    library = compiled(request.param, tmp_path_factory.mktemp("kernels"))
    with using(library):
        yield library


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Mixture:
    """Random experts, and where some tokens go: never to the second, if there are more than a token goes to."""

    def __init__(self, tokens, width, inner, experts, per_token, seed=0):
        shapes = ((inner, width), (inner, width), (width, inner))
        self.experts = [drawn(*shape, seed=9 * e + i) * 0.3 for e in range(experts) for i, shape in enumerate(shapes)]
        scores = drawn(tokens, experts, seed=100 + seed)
        if experts > per_token:
            scores[:, 1] = -100
        self.weights, self.chosen = scores.softmax(-1).topk(per_token)
        self.x = drawn(tokens, width, seed=200 + seed)

    def mix(self, x, weights, experts, rows=slice(None)):
        flat = self.chosen[rows].flatten()
        counts = torch.bincount(flat, minlength=len(experts) // 3).tolist()
        return mix(x, weights, flat.argsort(stable=True), counts, experts, min_rows=1)

    def loop(self, x, weights, experts):
        outs = []
        for token, mine, chosen in zip(x, weights, self.chosen.tolist(), strict=True):
            parts = [experts[3 * e : 3 * e + 3] for e in chosen]
            outs.append(
                sum(
                    w * (down @ (F.silu(gate @ token) * (up @ token)))
                    for w, (gate, up, down) in zip(mine, parts, strict=True)
                )
            )
        return torch.stack(outs)


def gradients(function, inputs, grad):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(inputs[0], inputs[1], inputs[2:])
    return [out.detach(), *torch.autograd.grad(out, inputs, grad, materialize_grads=True)]


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(variant, case):
    mixture = Mixture(*CASES[case])
    inputs, grad = [mixture.x, mixture.weights, *mixture.experts], drawn(*mixture.x.shape, seed=7)
    assert fits(mixture.x, mixture.experts)
    ours = gradients(mixture.mix, inputs, grad)
    exact = gradients(mixture.loop, [x.double() for x in inputs], grad.double())
    assert len(ours) == len(exact) == 3 + len(mixture.experts)
    for i, (found, wanted) in enumerate(zip(ours, exact, strict=True)):
        assert found.dtype == torch.float32 and found.shape == wanted.shape
        assert (found - wanted).norm() <= 1e-6 * wanted.norm(), i
        assert wanted.any() == (not 6 <= i < 9 or case == "as many as there are"), "all but the unused expert's move"


def test_a_token_has_the_same_bits_alone_and_with_any_number_of_threads(variant):
    mixture = Mixture(*CASES["several panels"])
    inputs, grad = [mixture.x, mixture.weights, *mixture.experts], drawn(*mixture.x.shape, seed=7)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(mixture.mix, inputs, grad))
    finally:
        torch.set_num_threads(before)
    for ours in found[1:]:
        assert all(map(torch.equal, ours, found[0]))
    for rows in (slice(0, 1), slice(31, 32), slice(20, 51)):
        part = mixture.mix(mixture.x[rows], mixture.weights[rows], mixture.experts, rows)
        assert torch.equal(part, found[0][0][rows])


def test_what_is_not_trained_has_no_gradient(variant):
    mixture, grad = Mixture(*CASES["few"]), drawn(5, 16, seed=7)
    x, weights = mixture.x.clone().requires_grad_(), mixture.weights.clone().requires_grad_()
    every = gradients(mixture.mix, [x.detach(), weights.detach(), *mixture.experts], grad)
    mixture.mix(x, weights, mixture.experts).backward(grad)
    assert torch.equal(x.grad, every[1]) and torch.equal(weights.grad, every[2])
    some = [e.clone().requires_grad_(i == 6) for i, e in enumerate(mixture.experts)]
    mixture.mix(x, weights, some).backward(grad)
    assert torch.equal(some[6].grad, every[3 + 6]) and all(e.grad is None for i, e in enumerate(some) if i != 6)


def test_a_token_that_is_no_number_spoils_its_own_output_alone(variant):
    mixture = Mixture(*CASES["several panels"])
    exact = mixture.mix(mixture.x, mixture.weights, mixture.experts)
    mixture.x[13] = float("nan")
    out = mixture.mix(mixture.x, mixture.weights, mixture.experts)
    assert out[13].isnan().all()
    out[13] = exact[13]
    assert torch.equal(out, exact)


def test_strides_and_no_token_at_all(variant):
    mixture = Mixture(*CASES["many small"])
    inputs, grad = [mixture.x, mixture.weights, *mixture.experts], drawn(48, 40, seed=7)
    straight = gradients(mixture.mix, inputs, grad.t().contiguous())
    turned = [mixture.x.t().contiguous().t(), mixture.weights.t().contiguous().t(), *mixture.experts]
    assert not turned[0].is_contiguous() and all(map(torch.equal, straight, gradients(mixture.mix, turned, grad.t())))
    nothing = mixture.mix(mixture.x[:0], mixture.weights[:0], mixture.experts, slice(0, 0))
    assert nothing.shape == (0, 48)


def test_other_types_sizes_and_layouts_are_left_to_torch():
    mixture = Mixture(*CASES["few"])
    x, experts = mixture.x, mixture.experts
    assert fits(x, experts)
    assert not fits(x.double(), [e.double() for e in experts]) and not fits(x.bfloat16(), experts)
    assert not fits(x, [experts[0].t().contiguous().t(), *experts[1:]])
    assert not fits(drawn(5, 17), Mixture(5, 17, 16, 3, 2).experts) and not fits(x, Mixture(5, 16, 20, 3, 2).experts)
    assert not fits(x.to("meta"), [e.to("meta") for e in experts])


def test_shapes_are_known_without_data():
    mixture = Mixture(*CASES["few"])
    x, weights, *experts = (tensor.to("meta") for tensor in (mixture.x, mixture.weights, *mixture.experts))
    order, counts = torch.empty(10, dtype=torch.int64, device="meta"), [4, 0, 6]
    out, wide = torch.ops.pellucid.experts(x, weights, order, counts, experts)
    assert (out.shape, wide.shape) == ((5, 16), (10, 32))
    for trained, num in ((True, 3), (False, 0)):
        grads = torch.ops.pellucid.experts_backward(x, x, weights, order, counts, experts, wide, trained)
        assert [g.shape for g in grads] == [(5, 16), (5, 2), (2 * num, 16, 16), (num, 16, 16)]


def test_the_check_at_loading_finds_nothing_wrong(variant):
    assert disagreement(variant) is None
