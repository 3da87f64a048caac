"""What a parallel mode does in a step. The loop calls these methods and has no branch on the mode."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.config import build
from pellucid.registry import lookup, register


class Executor:
    """One process: all weights, gradients and optimizer state are here, and nothing is sent.

    The loop divides losses by the global weight of the step, so gradients of micro-batches are summed.
    With ``loss_scaler`` (float16) gradients are unscaled by `finish_grads`.
    """

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.scaler: LossScaler | None = None
        self.sync_gradients = True

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, scaler: "LossScaler | None" = None
    ) -> nn.Module:
        """Take over ``model`` and ``optimizer``; returns the model to call in the loop."""
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        return model

    @contextmanager
    def accumulate(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Around the forward and backward of one micro-batch; ``last`` says that the optimizer step follows."""
        self.sync_gradients = last
        yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, already divided by the weight of the whole step."""
        (loss if self.scaler is None else loss * self.scaler.scale).backward()

    def finish_grads(self) -> None:
        """Gradients are final after this."""
        if self.scaler is not None:
            torch._foreach_mul_(self._grads(), 1 / self.scaler.scale)

    def grad_norm(self) -> float:
        """The global L2 norm of the gradients, each parameter counted once."""
        grads = self._grads()
        if not grads:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32))))

    def clip_grad_norm_(self, max_norm: float, norm: float | None = None) -> float:
        """Scale gradients so that their norm is at most ``max_norm``; returns the norm before.

        Args:
            norm: what `grad_norm` gave, if it was asked already.
        """
        norm = self.grad_norm() if norm is None else norm
        if norm > max_norm and math.isfinite(norm):
            torch._foreach_mul_(self._grads(), max_norm / norm)
        return norm

    def step(self) -> None:
        """Update the weights and drop the gradients."""
        assert self.optimizer is not None, "prepare() comes first"
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        assert self.optimizer is not None, "prepare() comes first"
        self.optimizer.zero_grad(set_to_none=True)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The bare model, whose parameter names checkpoints use."""
        return model

    def _grads(self) -> list[Tensor]:
        assert self.model is not None, "prepare() comes first"
        return [p.grad for p in self.model.parameters() if p.grad is not None]


class LossScaler:
    """Keeps float16 gradients out of the range where they vanish.

    The scale doubles after ``growth_interval`` finite steps and halves at each non-finite one, which is skipped.
    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
    """

    def __init__(self, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scale, self.growth_interval, self.finite_steps = scale, growth_interval, 0

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to a step whose gradients were finite or not."""
        if not finite:
            self.scale, self.finite_steps = self.scale / 2, 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.scale, self.finite_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """For the checkpoint."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.scale, self.finite_steps = state["scale"], int(state["finite_steps"])


register("mode", "none")(Executor)


def create_executor(mode: str, **options: Any) -> Executor:
    """The executor of a registered parallel mode.

    Raises:
        ConfigError: the mode is unknown, or it has no such option; the nearest is named.
    """
    entry = lookup("mode", mode)
    build(entry.config, options, f"parallel.{mode}.")
    executor: Executor = entry.target(**options)
    return executor
