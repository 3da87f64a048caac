"""The only module that calls a collective. Each call names what it moves (``tag``) and is recorded.

W ranks. Where there is one rank nothing is sent and nothing is recorded. `use` sets what watches the calls of this process:
a ledger, a check that ranks agree, a link to imitate.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload

import torch
import torch.distributed as dist
from torch import Tensor

from pellucid.parallel.check import Intent
from pellucid.parallel.ledger import Clock, CommEvent, CommLedger, Phase, wire_bytes
from pellucid.parallel.link import Link

Group = dist.ProcessGroup | None
"""None is the group of all ranks."""
Tensors = Tensor | Sequence[Tensor]


class Check(Protocol):
    """Compares what ranks are about to do; see `pellucid.parallel.check`."""

    def before(self, intent: Intent) -> None: ...
    def leave(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Watch:
    ledger: CommLedger | None = None
    check: Check | None = None
    check_until: int | None = None
    link: Link | None = None
    clock: Clock = field(default_factory=Clock)


_watch = _Watch()

before_collective: Callable[[str, str], None] | None = None
"""Called before each collective with its name and tag, as they stand in the ledger; drills kill here."""


def use(
    *,
    ledger: CommLedger | None = None,
    check: Check | None = None,
    check_until: int | None = None,
    link: Link | None = None,
) -> None:
    """What watches the collectives of this process from now on; nothing, if called without arguments.

    Args:
        check_until: the last step whose collectives are checked; None checks all.
    """
    _watch.ledger, _watch.check, _watch.check_until, _watch.link = ledger, check, check_until, link


def ledger() -> CommLedger | None:
    """What records the collectives of this process, if something does."""
    return _watch.ledger


def check_until(step: int) -> None:
    """Check up to ``step``, where not all steps are checked."""
    if _watch.check_until is not None:
        _watch.check_until = step


def leave(reason: str) -> None:
    """This rank will issue no more collectives; ranks that are about to wait for it are told why."""
    if _watch.check is not None:
        _watch.check.leave(reason)
        _watch.check = None


@contextmanager
def record(into: CommLedger | None = None) -> Iterator[CommLedger]:
    """A ledger of the collectives issued inside: ``into``, or a new one."""
    outer, _watch.ledger = _watch.ledger, into if into is not None else CommLedger()
    try:
        yield _watch.ledger
    finally:
        _watch.ledger = outer


def begin_step(step: int) -> None:
    """Optimizer step ``step``, counted from 1, is under way: times and lines of the ledger belong to it."""
    _watch.clock.begin_step(step)


def begin_micro_batch(micro: int) -> None:
    """Micro-batch ``micro`` of the step is under way."""
    _watch.clock.micro = micro


def enter(phase: Phase) -> None:
    """What this rank does from here on, for the collectives that it issues and for the trace."""
    _watch.clock.enter(phase, _watch.ledger)


class Pending:
    """A collective under way. Nobody may touch its tensors before `wait` has returned."""

    __slots__ = ("_deadline", "_event", "_finish", "_finished_at", "_open", "_works")

    def __init__(
        self,
        works: Sequence[Any] = (),
        event: CommEvent | None = None,
        deadline: float = 0.0,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._works, self._event, self._deadline, self._finish = works, event, deadline, finish
        self._finished_at, self._open = math.inf, len(works)
        if event is not None:
            for work in works:
                _call_when_done(work, self._note_time)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works) and time.perf_counter() >= self._deadline

    def wait(self) -> None:
        """Until the result is there. A second call does nothing."""
        if not self._works:
            return
        asked = time.perf_counter()
        for work in self._works:
            work.wait()
        remaining = self._deadline - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        done = time.perf_counter()
        if self._event is not None:
            began = _watch.clock.began
            self._event.t_wait = asked - began
            # what finished before it was asked for says so itself, from the thread that carried it
            self._event.t_done = min(max(self._finished_at, self._deadline), done) - began
        finish, self._works, self._finish = self._finish, (), None
        if finish is not None:
            finish()

    def then(self, function: Callable[[], None]) -> "Pending":
        """Run ``function`` once, when the first `wait` has the result; at once where there is nothing to wait for."""
        if not self._works:
            function()
            return self
        before = self._finish

        def both() -> None:
            if before is not None:
                before()
            function()

        self._finish = both
        return self

    def future(self, value: Tensor) -> "torch.futures.Future[Tensor]":
        """For engines of torch's own: resolves to ``value`` when the collective is over."""

        def over(_done: Any) -> Tensor:
            time.sleep(max(0.0, self._deadline - time.perf_counter()))
            if self._event is not None:  # who waits, and from when, torch does not let us see
                self._event.t_wait = self._event.t_done = _watch.clock.now()
            return value

        (work,) = self._works
        result: torch.futures.Future[Tensor] = work.get_future().then(over)
        return result

    def _note_time(self, _future: Any) -> None:
        self._open -= 1
        if self._open == 0:
            self._finished_at = time.perf_counter()


def _call_when_done(work: Any, callback: Callable[[Any], None]) -> None:
    try:
        work.get_future().add_done_callback(callback)
    except RuntimeError:  # a backend without futures: done is when the wait is over
        return


# -- collectives --------------------------------------------------------------------------------------------


@overload
def all_reduce(value: float, *, tag: str) -> float: ...
@overload
def all_reduce(value: Sequence[float], *, tag: str) -> list[float]: ...


def all_reduce(value: float | Sequence[float], *, tag: str) -> float | list[float]:
    """The sum of a number, or of several, over all ranks, in float64; what was given where there is one rank.

    Args:
        value: this rank's share.
        tag: what is summed, as the ledger names it ("tokens", "loss").
    """
    if world_size() == 1:
        return value if isinstance(value, int | float) else list(value)
    total = torch.tensor(value, dtype=torch.float64, device=_device())
    all_reduce_(total, tag=tag).wait()
    result: float | list[float] = total.tolist()
    return result


def all_reduce_(
    tensor: Tensor, *, tag: str, op: Literal["sum", "max"] = "sum", owner: Sequence[str] = (), group: Group = None
) -> Pending:
    """Sum ``tensor`` in place over the ranks of ``group``, or take the largest of each element."""
    if world_size(group) == 1:
        return Pending()
    event, deadline = _begin("all_reduce", tensor, tag, owner, group)
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    return Pending([dist.all_reduce(tensor, reduce_op, group=group, async_op=True)], event, deadline)


def reduce_scatter(
    full: Tensors, shard: Tensors, *, tag: str, owner: Sequence[str] = (), group: Group = None
) -> Pending:
    """Sum ``full [W * n]`` over ranks into ``shard [n]``: rank r gets elements ``[r n, (r + 1) n)``.

    On CPU it is W - 1 exchanges and a sum in rank order: gloo's own would move as much as an all-reduce.
    ``shard`` may be this rank's own part of ``full``. Several pairs of tensors count as one collective, of the first's dtype.
    """
    fulls, shards = _as_list(full), _as_list(shard)
    size = world_size(group)
    if size == 1:
        for whole, part in zip(fulls, shards, strict=True):
            part.copy_(whole)
        return Pending()
    event, deadline = _begin("reduce_scatter", fulls[0], tag, owner, group, several=fulls)
    if fulls[0].device.type != "cpu":
        scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        pairs = zip(fulls, shards, strict=True)
        return Pending([scatter(part, whole, group=group, async_op=True) for whole, part in pairs], event, deadline)
    mine, works = rank(group), []
    rows = [list(whole.view(size, -1).unbind()) for whole in fulls]
    received = [list(parts) for parts in rows]
    for distance in range(1, size):  # one after the other: buffers stay small, and this rank's own part is not copied
        to, source = (mine + distance) % size, (mine - distance) % size
        for parts, came in zip(rows, received, strict=True):
            came[source] = torch.empty_like(parts[mine])
            works.append(_exchange(parts[to], to, came[source], source, group))

    def add_up() -> None:
        for came, part in zip(received, shards, strict=True):
            # ``part`` may be this rank's own row, which must not be written before it has been added
            total = torch.add(came[0], came[1], out=part if mine < 2 else came[0])
            for row in came[2:]:
                total.add_(row)
            if total is not part:
                part.copy_(total)

    return Pending(works, event, deadline, add_up)


def all_to_all(full: Tensor, received: Tensor, *, tag: str, owner: Sequence[str] = (), group: Group = None) -> Pending:
    """This rank's part, the r-th for rank r, of each rank's ``full [W * n]``, in rank order, into ``received [W * n]``."""
    if world_size(group) == 1:
        received.copy_(full)
        return Pending()
    event, deadline = _begin("all_to_all", full, tag, owner, group)
    return Pending([dist.all_to_all_single(received, full, group=group, async_op=True)], event, deadline)


def all_gather(shard: Tensors, full: Tensors, *, tag: str, owner: Sequence[str] = (), group: Group = None) -> Pending:
    """Concatenate every rank's ``shard [n]`` into ``full [W * n]``; ``shard`` may be its own place there already.

    On CPU it is W - 1 exchanges into that place: gloo's own gathers into a copy first. Several pairs of tensors count as one
    collective, of the first's dtype.
    """
    shards, fulls = _as_list(shard), _as_list(full)
    size = world_size(group)
    if size == 1:
        for part, whole in zip(shards, fulls, strict=True):
            whole.copy_(part)
        return Pending()
    event, deadline = _begin("all_gather", fulls[0], tag, owner, group, several=fulls)
    if fulls[0].device.type != "cpu":
        gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        pairs = zip(shards, fulls, strict=True)
        return Pending([gather_into(whole, part, group=group, async_op=True) for part, whole in pairs], event, deadline)
    mine, works = rank(group), []
    for part, whole in zip(shards, fulls, strict=True):
        places = whole.view(size, -1)
        if places[mine].data_ptr() != part.data_ptr():
            places[mine].copy_(part)
        for distance in range(1, size):
            to, source = (mine + distance) % size, (mine - distance) % size
            works.append(_exchange(part, to, places[source], source, group))
    return Pending(works, event, deadline)


def broadcast(tensor: Tensor, *, tag: str, src: int = 0, owner: Sequence[str] = (), group: Group = None) -> Pending:
    """Copy the ``tensor`` of rank ``src`` of the group over everybody's."""
    if world_size(group) == 1:
        return Pending()
    event, deadline = _begin("broadcast", tensor, tag, owner, group, src=src)
    return Pending([dist.broadcast(tensor, group=group, group_src=src, async_op=True)], event, deadline)


def gather(shard: Tensor, full: Tensor | None, *, tag: str, owner: Sequence[str] = (), group: Group = None) -> Pending:
    """Concatenate every rank's ``shard [n]`` into the first rank's ``full [W * n]``; the others pass None."""
    size = world_size(group)
    if size == 1:
        assert full is not None
        full.copy_(shard)
        return Pending()
    event, deadline = _begin("gather", shard, tag, owner, group, numel=shard.numel() * size)
    if shard.device.type == "cpu":  # straight into its place: gloo's own gather makes a copy of the whole first
        received = full if full is not None else shard.new_empty(0)
        n, first = shard.numel(), full is not None
        outgoing = [n if r == 0 else 0 for r in range(size)]
        works = [
            dist.all_to_all_single(received, shard, [n if first else 0] * size, outgoing, group=group, async_op=True)
        ]
        return Pending(works, event, deadline)
    rows = list(full.view(size, -1).unbind()) if full is not None else None
    return Pending([dist.gather(shard, rows, group=group, group_dst=0, async_op=True)], event, deadline)


def all_gather_bytes(data: bytes, *, tag: str, group: Group = None) -> list[bytes]:
    """What every rank has to say, in rank order, on every rank."""
    size = world_size(group)
    if size == 1:
        return [data]
    lengths = torch.empty(size, dtype=torch.int64, device=_device())
    all_gather(torch.tensor([len(data)], device=_device()), lengths, tag=f"{tag}/lengths", group=group).wait()
    longest = max(1, int(lengths.max()))
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(_device())
    table = torch.empty(size * longest, dtype=torch.uint8, device=_device())
    all_gather(padded, table, tag=tag, group=group).wait()
    rows = table.view(size, longest).cpu().numpy()
    return [rows[i, : int(length)].tobytes() for i, length in enumerate(lengths)]


def barrier(*, tag: str) -> None:
    """Until every rank is here."""
    if world_size() == 1:
        return
    event, deadline = _begin("barrier", torch.empty(0), tag, (), None)
    Pending([dist.barrier(async_op=True)], event, deadline).wait()


def decide(name: str, value: bool) -> bool:
    """``value``, a decision that every rank takes by itself: while calls are checked, compared between ranks first."""
    if world_size() > 1 and _checked():
        assert _watch.check is not None
        _watch.check.before(
            Intent(op="decide", tag=name, dtype="", numel=0, value=f"{name}={value}", site=_call_site())
        )
    return value


def world_size(group: Group = None) -> int:
    """Ranks in a group; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank(group: Group = None) -> int:
    """This rank's number in a group; 0 without a process group."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def _as_list(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _exchange(sent: Tensor, to: int, received: Tensor, source: int, group: Group) -> Any:
    """Send a tensor to one rank while another of the same size comes from a rank; returns the work."""
    n, size = sent.numel(), world_size(group)
    incoming, outgoing = ([n if r == other else 0 for r in range(size)] for other in (source, to))
    return dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True)


# -- what surrounds each call -------------------------------------------------------------------------------


def _begin(
    op: str,
    tensor: Tensor,
    tag: str,
    owner: Sequence[str],
    group: Group,
    *,
    numel: int | None = None,
    several: Sequence[Tensor] = (),
    src: int = 0,
) -> tuple[CommEvent | None, float]:
    """Check, then note a collective; returns its line and when an imitated link will have carried it (0: no link).

    Args:
        numel: elements that it carries, where they are not those of ``tensor``.
        several: tensors, of dtypes that may differ, that it carries.
    """
    if before_collective is not None:
        before_collective(op, tag)
    size = world_size(group)
    numel = sum(t.numel() for t in several) if several else tensor.numel() if numel is None else numel
    payload = sum(t.nbytes for t in several) if several else numel * tensor.element_size()
    kind = str(tensor.dtype).removeprefix("torch.")
    if (
        _checked() and size == world_size()
    ):  # the ranks of a smaller group are not all of those that the check waits for
        assert _watch.check is not None
        _watch.check.before(Intent(op=op, tag=tag, dtype=kind, numel=numel, site=_call_site()))
    if _watch.ledger is None and _watch.link is None:
        return None, 0.0
    sent = wire_bytes(op, payload, size, (rank(group) - src) % size)
    issued = _watch.clock.now()
    deadline = _watch.link.charge(sent) if _watch.link is not None else 0.0
    if _watch.ledger is None:
        return None, deadline
    clock = _watch.clock
    name = "world" if group is None or group == dist.group.WORLD else str(group.group_name)
    event = CommEvent(
        clock.step, clock.micro, op, tag, name, kind, numel, payload, sent, tuple(owner), clock.phase, issued
    )
    _watch.ledger.events.append(event)
    return event, deadline


def _checked() -> bool:
    return _watch.check is not None and (_watch.check_until is None or _watch.clock.step <= _watch.check_until)


def _call_site() -> str:
    """The nearest caller outside this module, as ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _device() -> torch.device:
    """Where small tensors must be for the backend to move them."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
