"""Muon for hidden matrices, AdamW for everything else.

R rows and C columns of a weight.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pellucid.errors import ConfigError
from pellucid.optim.groups import parameter_groups, require_wide
from pellucid.registry import register

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that moves singular values from (0, 1] to about [0.7, 1.2]; Jordan et al. 2024."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonOptions:
    """Orthogonalised momentum for hidden matrices; Jordan et al. 2024, https://kellerjordan.github.io/posts/muon."""

    momentum: float = 0.95
    """Decay rate of the momentum of hidden matrices."""
    newton_schulz_steps: int = 5
    """Iterations that orthogonalise an update."""
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
        if not self.weight_decay >= 0:
            raise ConfigError(f"optim.weight_decay must not be negative, got {self.weight_decay}")


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
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, same in by_shape.items():
            gradients = [p.grad for p in same if p.grad is not None]
            buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in same]
            torch._foreach_mul_(buffers, self.options.momentum)
            torch._foreach_add_(buffers, gradients)
            ahead = torch._foreach_add(gradients, buffers, alpha=self.options.momentum)
            updates = orthogonalize(torch.stack(ahead), self.options.newton_schulz_steps)
            torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
            scale = math.sqrt(max(1.0, shape[0] / shape[1]))
            torch._foreach_add_(same, list(updates.unbind()), alpha=-group["lr"] * scale)

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


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrices, roughly, whose singular values are all about 1, in ``[0.7, 1.2]``.

    Args:
        matrices: ``[N, R, C]``, float32 or wider; each is scaled to unit Frobenius norm first and worked on as a wide one.

    Source:
        Newton-Schulz iteration of Jordan et al. 2024; Bernstein & Newhouse 2024, arXiv:2409.20325.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


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
