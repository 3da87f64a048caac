"""What a parallel mode does in a step. The loop calls these methods and has no branch on the mode."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.config_tables import build
from pellucid.errors import CheckpointError, ConfigError
from pellucid.parallel import comm
from pellucid.parallel.layout import ParameterInfo, parameter_infos
from pellucid.parallel.loop_objects import PreparedOptimizer, PreparedScheduler, SchedulerProtocol, prepare_loader
from pellucid.parallel.optimizer_state import load_whole_state, optimized_parameters, state_parts
from pellucid.parallel.ordered import MicroBatchTree, Reduction, global_norm, refuse_order
from pellucid.parallel.parts import Part, SavedTensors, check_weights, weight_shapes
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
        self.reduction: Reduction = "sum"
        """How gradients are added, before `prepare`: as they come, or "ordered"; see `pellucid.parallel.ordered`."""
        self._tree: MicroBatchTree | None = None
        self.weights_tag = "param"
        """What tags of gathered weights begin with, before `prepare`; a second model has another."""
        self.infos: list[ParameterInfo] = []
        """The model's parameters, as `plan` wants them."""
        self.optimized: dict[str, int] = {}
        """The trainable ones that the optimizer updates, and the index of the group of each."""
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
        self.optimized = optimized_parameters(model, optimizer) if optimizer is not None else {}
        if self.use_distributed and optimizer is not None:
            _refuse_strangers(model, optimizer)
        if self.reduction == "ordered":
            self._tree = MicroBatchTree(model.named_parameters())
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
        tree = self._tree
        with self._window(), tree.micro_batch(self._micro, last=self.sync_gradients) if tree else nullcontext():
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
        if self._tree is not None:
            return global_norm(self.gradients(), sharded=self.shards_gradients)
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

    def gradients(self) -> Iterator[Part]:
        """The final gradients that this rank holds: each whole, or the slice that this rank owns."""
        assert self.model is not None, "prepare() comes first"
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield Part(name, tuple(parameter.shape), 0, parameter.grad)

    @property
    def shards_gradients(self) -> bool:
        """Whether `gradients` gives slices, which together over all ranks are the whole."""
        return False

    # -- checkpoints ----------------------------------------------------------------------------------------

    shards_state = False
    """Whether ranks hold the optimizer's state in parts, so that each writes a file of its own."""
    shards_weights = False
    """Whether `weights` is collective: ranks hold weights in parts."""

    def optimizer_parts(self) -> Iterator[Part]:
        """This rank's part of the optimizer's state, as ``"<parameter>/exp_avg"``, not copied; no collective.

        The parts of all ranks together are each tensor exactly once: here all of them, whole, come from the first rank.
        A single number such as ``step`` has shape () and comes from the rank that holds element 0 of its parameter.

        Raises:
            CheckpointError: the state cannot be saved under the names of parameters; says why.
        """
        model, optimizer = self._checkpointed()
        if comm.rank() == 0:
            for name, parameter in model.named_parameters():
                state = optimizer.state.get(parameter, {})
                yield from state_parts(name, tuple(parameter.shape), 0, parameter, state)

    def load_optimizer_state(self, saved: SavedTensors) -> None:
        """Put back a state that any mode gave, on any number of ranks. Reads only what this rank holds; no collective.

        Raises:
            CheckpointError: a parameter has no state, or a state has no parameter or another shape; names it, and
                nothing is changed.
        """
        load_whole_state(*self._checkpointed(), saved)

    def weight_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every whole weight by its bare name, tied ones once; wide types first, as files want them."""
        assert self.model is not None, "prepare() comes first"
        return weight_shapes(self.model)

    def held_weights(self) -> Iterator[Part]:
        """What this rank holds of each weight, not copied: all of it, or its rows."""
        assert self.model is not None, "prepare() comes first"
        for name, parameter in self.model.named_parameters():
            yield Part(name, tuple(parameter.shape), 0, parameter.detach())

    def weights(self, of: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """Every whole weight, in the order of `weight_shapes`, one at a time and not copied where a rank has it anyway.

        Collective if `shards_weights`: all ranks must go through all of it, and those after the first may get None. A
        tensor is only good until the next one is asked for.

        Args:
            of: other tensors by the names of weights, of which each rank holds what it holds of the weights; those alone
                are given.
        """
        assert self.model is not None, "prepare() comes first"
        held = {part.name: part.tensor for part in self.held_weights()} if of is None else of
        for name in self.weight_shapes():
            if name in held:
                yield name, held[name]

    def load_weights(self, saved: SavedTensors) -> None:
        """Put saved weights into the model, strictly, one tensor at a time; each rank reads for itself.

        Raises:
            CheckpointError: weights are missing, extra or of another shape; names them, and nothing is changed.
        """
        assert self.model is not None, "prepare() comes first"
        check_weights(saved, {name: shape for name, (shape, _) in self.weight_shapes().items()})
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(saved.read(name).view(parameter.shape))

    def add_to_weight(self, name: str, delta: Tensor) -> None:
        """Add to a weight that no optimizer updates, such as a router's bias; ``delta`` is whole and the same on every rank."""
        assert self.model is not None, "prepare() comes first"
        with torch.no_grad():
            parameter = self.model.get_parameter(name)
            parameter.add_(delta.to(parameter.device, parameter.dtype))

    def _checkpointed(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        assert self.model is not None and self.optimizer is not None, "prepare() comes first"
        if isinstance(self.optimizer, ShardedOptimizer):
            raise CheckpointError("the optimizer's state is divided over ranks by itself; use optimizer.state_dict()")
        return self.model, self.optimizer

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
        return [part.tensor for part in self.gradients()]


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


def create_executor(
    mode: str, grad_accum_steps: int = 1, *, average: bool = True, reduction: Reduction = "sum", **options: Any
) -> Executor:
    """The executor of a registered parallel mode.

    With one process every mode runs as ``none``, and says so once.

    Args:
        reduction: "ordered" adds gradients in an order that does not depend on the number of ranks, if every rank runs
            ``grad_accum_steps`` micro-batches a step and rank r those that follow rank r - 1's.

    Raises:
        ConfigError: the mode is unknown or cannot run here, or it has no such option; the nearest is named.
    """
    entry = lookup("mode", mode)
    built: Any = build(entry.config, options, f"parallel.{mode}.")
    if reduction not in ("sum", "ordered"):
        raise ConfigError(f'parallel.reduction must be "sum" or "ordered", got {reduction!r}')
    if reduction == "ordered":
        refuse_order(mode, getattr(built, "reduce_dtype", None), grad_accum_steps, comm.world_size())
    if comm.world_size() == 1 and mode != "none":
        _say_once(f"parallel.mode {mode} with one process runs as none")
        executor = Executor(grad_accum_steps, average=average)
    else:
        executor = entry.target(grad_accum_steps, average=average, options=built)
    executor.reduction = reduction
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
