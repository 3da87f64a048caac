"""Muon for hidden matrices, AdamW for everything else.

R rows and C columns of a weight.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pellucid.errors import ConfigError
from pellucid.optim.groups import parameter_groups, require_wide
from pellucid.registry import register

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that moves singular values from (0, 1] to about [0.7, 1.2]; Jordan et al. 2024."""
RENEWED = 2
"""Iterations on x x^T before it is computed anew from x. In bfloat16 its own rounding grows twelvefold in each; after three
some matrices of 8 x 16 came out with singular values of 9."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonOptions:
    """Orthogonalised momentum for hidden matrices; Jordan et al. 2024, https://kellerjordan.github.io/posts/muon."""

    momentum: float = 0.95
    """Decay rate of the momentum of hidden matrices."""
    newton_schulz_steps: int = 5
    """Iterations that orthogonalise an update."""
    newton_schulz_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What their matrix products are computed in; "auto": bfloat16 where train.dtype is, else float32 (float64 weights: that)."""
    weight_decay: float = 0.0
    """Decay a step, times the learning rate, of matrices."""
    adamw_lr_ratio: float = 0.25
    """Learning rate of embeddings, head, norms and biases, which AdamW updates, as a share of optim.lr."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's addition to the root of the second moment."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.momentum must be in [0, 1), got {self.momentum}")
        if self.newton_schulz_steps < 1:
            raise ConfigError(f"optim.newton_schulz_steps must be at least 1, got {self.newton_schulz_steps}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas must be in [0, 1), got {list(self.betas)}")
        for name in ("adamw_lr_ratio", "eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"optim.{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optim.weight_decay must be a number from 0 on, got {self.weight_decay}")


class Muon(torch.optim.Optimizer):
    """Muon on the groups that say ``"muon": True``, fused AdamW on the others.

    State by parameter: ``momentum`` or ``step``, ``exp_avg`` and ``exp_avg_sq``.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, options: MuonOptions) -> None:
        self.options = options
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "muon": False, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                (self._step_muon if group["muon"] else self._step_adamw)(parameters, group)

    def _step_muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """p <- p (1 - lr wd) - lr sqrt(max(1, R / C)) orthogonal(g + m b), where b <- m b + g."""
        options = self.options
        narrow = torch.bfloat16 if options.newton_schulz_dtype == "bfloat16" else None
        for same in _together(parameters):
            gradients = [p.grad for p in same if p.grad is not None]
            buffers = [self._momentum(p) for p in same]
            torch._foreach_mul_(buffers, options.momentum)
            torch._foreach_add_(buffers, gradients)
            ahead = torch._foreach_add(gradients, buffers, alpha=options.momentum)
            alone = len(ahead) == 1  # products of single matrices have the faster kernels
            whole = orthogonalize(ahead[0] if alone else torch.stack(ahead), options.newton_schulz_steps, dtype=narrow)
            updates = [whole] if alone else list(whole.unbind())
            if group["weight_decay"]:
                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
            scale = math.sqrt(max(1.0, same[0].shape[0] / same[0].shape[1]))
            torch._foreach_add_(same, updates, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum"]
        return buffer

    def _step_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.options.betas[0],
            beta2=self.options.betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.options.eps,
            maximize=False,
        )


def _together(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Which matrices are updated in one call.

    On a GPU all of one shape. Elsewhere each alone: it then has the same bits on any number of ranks, and stays in cache.
    """
    if parameters[0].device.type == "cpu":
        return [[parameter] for parameter in parameters]
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    return list(by_shape.values())


def orthogonalize(matrices: Tensor, steps: int = 5, *, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest matrices, roughly, whose singular values are all about 1, in ``[0.7, 1.2]``.

    Wide ones are iterated on as S = x x^T, which is smaller: each step multiplies x by a polynomial p(S), and takes S to
    p(S) S p(S). So x itself is multiplied once in `RENEWED` steps, not twice in each.

    Args:
        matrices: ``[R, C]`` or ``[N, R, C]``, float32 or wider; each is scaled to unit Frobenius norm first and worked on as a
            wide one.
        dtype: of the products; None: as ``matrices``.

    Returns:
        The shape and the type of ``matrices``.

    Source:
        Newton-Schulz iteration of Jordan et al. 2024; Bernstein & Newhouse 2024, arXiv:2409.20325.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30)).to(
        dtype or x.dtype, memory_format=torch.contiguous_format
    )
    group = RENEWED if x.shape[-1] >= 2 * x.shape[-2] else 1
    for done in range(0, steps, group):
        x = _iterate(x, min(group, steps - done))
    x = x.to(matrices.dtype)
    return x.mT if tall else x


def _iterate(x: Tensor, steps: int) -> Tensor:
    """``steps`` iterations of the quintic a x + b S x + c S^2 x, with S = x x^T."""
    a, b, c = COEFFICIENTS
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    square, product = x @ x.mT, None
    for left in reversed(range(steps)):
        factor = add_product(square, square, square, beta=b, alpha=c)  # p(S) - a
        if product is None and not left:
            return add_product(x, factor, x, beta=a)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if left:
            square = factor @ square @ factor
    assert product is not None
    return product @ x


@register("optimizer", "muon", config=MuonOptions)
def build_muon(model: nn.Module, lr: float, options: MuonOptions) -> Muon:
    """Muon over ``model``'s hidden matrices at ``lr``, AdamW over its embeddings, head, norms and biases.

    Raises:
        ConfigError: a parameter is of a narrower type than float32.
    """
    require_wide(model, "muon")
    matrices, *rest = parameter_groups(model, weight_decay=options.weight_decay)
    hidden = [(name, p) for name, p in matrices["params"] if not name.startswith("lm_head.")]
    head = [(name, p) for name, p in matrices["params"] if name.startswith("lm_head.")]
    groups = [matrices | {"params": hidden, "muon": True}, matrices | {"params": head}, *rest]
    groups[0]["elementwise"] = False  # an orthogonal update needs the whole matrix
    for group in groups[1:]:
        group |= {"lr_scale": options.adamw_lr_ratio, "elementwise": True}
    return Muon([group for group in groups if group["params"]], lr, options)
