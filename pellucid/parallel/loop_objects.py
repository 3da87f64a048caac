"""The optimizer, scheduler and loader of a training loop of one's own, as `Executor.prepare` hands them back."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from pellucid.errors import ConfigError
from pellucid.parallel import comm

if TYPE_CHECKING:
    from pellucid.parallel.executor import Executor

logger = logging.getLogger("pellucid")


@runtime_checkable
class OptimizerProtocol(Protocol):
    """What a loop needs of an optimizer; torch's own have it."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@runtime_checkable
class SchedulerProtocol(Protocol):
    """What a loop needs of a learning rate schedule; torch's own have it."""

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def get_last_lr(self) -> list[float]: ...


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` is the executor's."""

    def __init__(self, executor: "Executor", optimizer: torch.optim.Optimizer) -> None:
        # not super().__init__: groups, state and hooks are those of the optimizer inside
        self.executor, self.optimizer = executor, optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer inside; a change of a hyper-parameter acts."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer inside."""
        return self.optimizer.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """`Executor.step`: waits for gradients if nobody did; inside an accumulation window it does nothing."""
        if closure is not None:
            raise ConfigError("step(closure) is not supported; compute the loss before step()")
        self.executor.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; inside an accumulation window it does nothing."""
        if not set_to_none:
            raise ConfigError("zero_grad(set_to_none=False) is not supported; gradients are dropped")
        self.executor.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside; in modes that shard it, of this rank's part."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the optimizer inside."""
        self.optimizer.load_state_dict(state_dict)


class PreparedScheduler:
    """A scheduler that moves only where gradients are synchronised."""

    def __init__(self, executor: "Executor", scheduler: SchedulerProtocol) -> None:
        self.executor, self.scheduler = executor, scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)

    def step(self) -> None:
        """One optimizer step further; inside an accumulation window it does nothing."""
        if self.executor.sync_gradients:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """That of the scheduler inside."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the scheduler inside."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float]:
        """The rates of the groups."""
        return self.scheduler.get_last_lr()


def prepare_loader(loader: Iterable[Any]) -> Iterable[Any]:
    """This rank's share of a loader, with equally many batches on every rank.

    A ``DataLoader`` in shuffled or plain order over a sized dataset gets a ``DistributedSampler``; the caller calls
    ``loader.sampler.set_epoch(n)`` for another order in each epoch. Others are each rank's own and end together.
    """
    if comm.world_size() == 1:
        return loader
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        if isinstance(loader.sampler, DistributedSampler):
            return loader
        if isinstance(loader.sampler, RandomSampler | SequentialSampler) and loader.batch_size is not None:
            return _sampled(loader)
    return EndTogether(loader)


def _sampled(loader: "DataLoader[Any]") -> "DataLoader[Any]":
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, comm.world_size(), comm.rank(), shuffle=shuffle, drop_last=loader.drop_last
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        persistent_workers=loader.persistent_workers,
    )


class EndTogether:
    """Iterates a rank's own batches until the first rank has no more, so that nobody waits for a rank that is done."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        """This rank's own; the epoch may be shorter."""
        if not isinstance(self.batches, Sized):
            raise TypeError(f"{type(self.batches).__name__} has no length")
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        try:
            mine = len(self)
        except TypeError:  # a DataLoader has __len__ even where its dataset has none
            yield from self._unsized()
        else:
            yield from self._sized(mine)

    def _unsized(self) -> Iterator[Any]:
        for batch in self.batches:
            if comm.all_reduce(1.0, tag="batches") < comm.world_size():
                self._warn()
                return
            yield batch
        if comm.all_reduce(0.0, tag="batches") > 0:
            self._warn()

    def _sized(self, mine: int) -> Iterator[Any]:
        counts = [0.0] * comm.world_size()
        counts[comm.rank()] = mine
        counts = comm.all_reduce(counts, tag="batches")
        if min(counts) < max(counts):
            self._warn()
        for _, batch in zip(range(int(min(counts))), self.batches, strict=False):
            yield batch

    @staticmethod
    def _warn() -> None:
        logger.warning("ranks have unequal numbers of batches; this epoch ends with the shortest")
