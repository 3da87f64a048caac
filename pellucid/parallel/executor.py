"""What a parallel mode does in a step. The loop calls these methods and has no branch on the mode."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.config import build
from pellucid.errors import CheckpointError, ConfigError
from pellucid.parallel import comm
from pellucid.parallel.layout import ParameterInfo, parameter_infos
from pellucid.parallel.loop_objects import PreparedOptimizer, PreparedScheduler, SchedulerProtocol, prepare_loader
from pellucid.parallel.optimizer_state import load_optimizer_tensors, optimizer_tensors
from pellucid.parallel.sharded_optimizer import ShardedOptimizer
from pellucid.registry import NoOptions, lookup, register

logger = logging.getLogger("pellucid")


class Executor:
    """One process: all weights, gradients and optimizer state are here, and nothing is sent. Base of the other modes.

    Args:
        grad_accum_steps: micro-batches an optimizer step, for loops that do not say which one is the last.
        average: in `backward`, losses are means over what this rank holds, so gradients are averaged over ranks. False where
            losses are divided by the global weight already and gradients only have to be summed.
        options: the mode's own, as registered.
    """

    def __init__(self, grad_accum_steps: int = 1, *, average: bool = True, options: Any = None) -> None:
        if grad_accum_steps < 1:
            raise ConfigError(f"grad_accum_steps must be at least 1, got {grad_accum_steps}")
        self.grad_accum_steps, self.average, self.options = grad_accum_steps, average, options
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.scaler: LossScaler | None = None
        self.infos: list[ParameterInfo] = []
        """The trainable parameters, as `plan` wants them."""
        self.sync_gradients = True
        """Whether the micro-batch under way, or the last one, ends its accumulation window."""
        self._micro = 0
        self._finished = True
        self._refuse_world()

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return comm.world_size() > 1

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dataloader: Iterable[Any] | None = None,
        scheduler: SchedulerProtocol | None = None,
    ) -> tuple[Any, Any, Any, Any]:
        """Take over the objects of a training loop; returns them, wrapped, in the same order, None where None was given.

        The optimizer's ``step()`` is `step`, and acts, like its ``zero_grad()`` and the scheduler's ``step()``, only where
        gradients are synchronised. A ``DataLoader`` over a sized dataset is cut into equal shares; anything else that can
        be iterated is taken to be this rank's own share, and ends on all ranks when it ends on one.
        """
        self.model, self.optimizer = model, optimizer
        self.infos = parameter_infos(model, optimizer)
        if self.use_distributed and optimizer is not None:
            _refuse_strangers(model, optimizer)
        wrapped = self._wrap(model)
        return (
            wrapped,
            PreparedOptimizer(self, optimizer) if optimizer is not None else None,
            prepare_loader(dataloader) if dataloader is not None else None,
            PreparedScheduler(self, scheduler) if scheduler is not None else None,
        )

    @contextmanager
    def accumulate(self, model: nn.Module, *, last: bool | None = None) -> Iterator[None]:
        """Around forward and backward of one micro-batch.

        Args:
            last: whether the optimizer step follows; None counts ``grad_accum_steps``.
        """
        self.sync_gradients = (self._micro + 1) % self.grad_accum_steps == 0 if last is None else last
        comm.begin_micro_batch(self._micro)
        comm.enter("forward")
        self._finished = False
        with self._window():
            try:
                yield
            finally:
                comm.enter("other")
        self._micro = 0 if self.sync_gradients else self._micro + 1

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``. In a loop of one's own the caller divides it by ``grad_accum_steps``."""
        self._finished = False
        comm.enter("backward")
        (loss if self.scaler is None else loss * self.scaler.scale).backward()
        comm.enter("other")

    def finish_grads(self) -> None:
        """Gradients are final after this. A second call does nothing."""
        if self._finished:
            return
        self._finish()
        self._finished = True
        if self.scaler is not None and (grads := self._grads()):
            torch._foreach_mul_(grads, 1 / self.scaler.scale)

    def grad_norm(self) -> float:
        """The global L2 norm of the final gradients, each parameter counted once; the same number on every rank."""
        self.finish_grads()
        grads = self._grads()
        if not grads:
            return 0.0
        return float(torch.linalg.vector_norm(norms(grads)))

    def clip_grad_norm_(self, max_norm: float, norm: float | None = None) -> float:
        """Scale gradients so that their norm is at most ``max_norm``; returns the norm before.

        Inside an accumulation window it does nothing and returns 0.0: gradients are not final.

        Args:
            norm: what `grad_norm` gave, if it was asked already.
        """
        if not self.sync_gradients:
            return 0.0
        norm = self.grad_norm() if norm is None else norm
        grads = self._grads()
        if norm > max_norm and math.isfinite(norm) and grads:
            torch._foreach_mul_(grads, max_norm / norm)
        return norm

    def step(self) -> None:
        """Update the weights on every rank and drop the gradients; inside an accumulation window it does nothing."""
        if not self.sync_gradients:
            return
        assert self.optimizer is not None, "prepare() comes first"
        self.finish_grads()
        comm.enter("optimizer")
        self.optimizer.step()
        self._finish_weights()
        comm.enter("other")
        self._drop_grads()

    def zero_grad(self) -> None:
        """Drop the gradients; inside an accumulation window it does nothing."""
        if self.sync_gradients:
            self._drop_grads()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The bare model, whose parameter names checkpoints use."""
        return model

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The final gradients that this rank holds, by parameter name: each whole, or the slice that this rank owns."""
        assert self.model is not None, "prepare() comes first"
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    @property
    def shards_gradients(self) -> bool:
        """Whether `gradients` gives slices, which together over all ranks are the whole."""
        return False

    gathers_state = False
    """Whether `optimizer_state` gives copies of its own, in CPU memory."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state as ``"<parameter name>/<key>"``, whole and not copied where this rank has it all.

        Collective in modes that shard it: the first rank gets it, the others an empty table.
        """
        assert self.model is not None and self.optimizer is not None, "prepare() comes first"
        if isinstance(self.optimizer, ShardedOptimizer):
            raise CheckpointError("the optimizer's state is divided over ranks by itself; use optimizer.state_dict()")
        return optimizer_tensors(self.model, self.optimizer) if comm.rank() == 0 else {}

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `optimizer_state` gave, in any mode and for any number of ranks.

        Raises:
            CheckpointError: a parameter has no state, or a state has no parameter or another shape; names it.
        """
        assert self.model is not None and self.optimizer is not None, "prepare() comes first"
        load_optimizer_tensors(self.model, self.optimizer, tensors)

    # -- what a mode changes --------------------------------------------------------------------------------

    def _refuse_world(self) -> None:
        if self.use_distributed:
            raise ConfigError(
                f"parallel.mode is none and there are {comm.world_size()} processes, which would train apart; "
                "choose ddp, zero1 or torch_ddp"
            )

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    @contextmanager
    def _window(self) -> Iterator[None]:
        yield

    def _finish(self) -> None: ...

    def _finish_weights(self) -> None: ...

    def _drop_grads(self) -> None:
        assert self.model is not None, "prepare() comes first"
        for parameter in self.model.parameters():
            parameter.grad = None

    def _grads(self) -> list[Tensor]:
        return [grad for _, grad in self.gradients()]


def norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each, in float32 or wider."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64 if wide else torch.float32))


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


register("mode", "none", config=NoOptions)(Executor)


def create_executor(mode: str, grad_accum_steps: int = 1, *, average: bool = True, **options: Any) -> Executor:
    """The executor of a registered parallel mode.

    With one process every mode runs as ``none``, and says so once.

    Raises:
        ConfigError: the mode is unknown or cannot run here, or it has no such option; the nearest is named.
    """
    entry = lookup("mode", mode)
    built: Any = build(entry.config, options, f"parallel.{mode}.")
    if comm.world_size() == 1 and mode != "none":
        _say_once(f"parallel.mode {mode} with one process runs as none")
        return Executor(grad_accum_steps, average=average)
    executor: Executor = entry.target(grad_accum_steps, average=average, options=built)
    return executor


def _refuse_strangers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's and that no "
                    "rank would reduce; make it part of the module that prepare() gets"
                )


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)
