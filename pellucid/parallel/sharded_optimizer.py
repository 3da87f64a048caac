"""An optimizer of any class whose state is divided over ranks, whole tensors at a time (ZeRO-1 for a loop of one's own).

W ranks. Every rank holds all weights and gradients. Each parameter has one owner, which keeps its state, updates it and
sends the new weights to the others.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pellucid.errors import CheckpointError, ConfigError
from pellucid.parallel import comm
from pellucid.parallel.ddp import holds_rows, reducer_of, scale_for_average
from pellucid.parallel.layout import assign_whole, chunks, is_elementwise


class ShardedOptimizer(torch.optim.Optimizer):
    """Runs ``optimizer_cls`` on the parameters that this rank owns, then hands new weights round.

    Ownership is balanced by bytes: the most loaded rank has at most the mean plus the largest tensor. Frozen parameters have
    no owner and are never sent. ``param_groups`` are those of all parameters; a hyper-parameter changed there acts.

    Args:
        params: as any torch optimizer takes them: tensors, (name, tensor) pairs or groups; the same on every rank.
        optimizer_cls: a ``torch.optim.Optimizer`` class; ``kwargs`` are its own.
        process_group: the ranks to divide over; None is all.
        average_gradients: average gradients over ranks at the beginning of `step`. None: those that no wrapper of ours
            (`DDP`) makes global already.

    Raises:
        ConfigError: a parameter is given twice.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        average_gradients: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.group, self.average_gradients = process_group, average_gradients
        self.world_size, self.rank = comm.world_size(process_group), comm.rank(process_group)
        self._load = [0] * self.world_size
        self.owners: dict[Tensor, int] = {}
        """The rank that updates a trainable parameter."""
        self._inner: torch.optim.Optimizer | None = None
        make: Callable[..., torch.optim.Optimizer] = optimizer_cls
        probe = make([nn.Parameter(torch.zeros(1, 1))], **kwargs)  # checks kwargs, and knows the defaults
        super().__init__(params, probe.defaults)
        self._inner = make([self._own_part(group) for group in self.param_groups], **kwargs)
        self.state = self._inner.state

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer over this rank's own parameters."""
        assert self._inner is not None
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group; its parameters get owners, and the old ones keep theirs.

        Raises:
            ConfigError: a parameter is given twice.
        """
        _refuse_duplicates(param_group, {p for group in self.param_groups for p in group["params"]})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        trainable = [p for p in group["params"] if p.requires_grad]
        for owner, mine in enumerate(assign_whole([p.nbytes for p in trainable], self.world_size, self._load)):
            for i in mine:
                self.owners[trainable[i]] = owner
        if self._inner is not None:
            self._inner.add_param_group(self._own_part(group))

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with this rank's parameters alone."""
        own = [i for i, p in enumerate(group["params"]) if self.owners.get(p) == self.rank]
        # not as pairs: torch refuses a group without parameters, and so without names, beside named ones
        return group | {key: [group[key][i] for i in own] for key in ("params", "param_names") if key in group}

    # -- a step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Average gradients where that is this optimizer's duty, update what this rank owns, send and receive weights.

        Raises:
            ConfigError: a closure is given, a parameter was frozen when it was given here and no longer is, or `FSDP` shards it.
        """
        if closure is not None:
            raise ConfigError("ShardedOptimizer.step takes no closure; compute the loss before step()")
        for i, (parameter, name) in enumerate(self._named()):
            if holds_rows(parameter):
                raise ConfigError(
                    f"{_words(i, name)} is sharded by FSDP, and its optimizer's state with it; use a plain optimizer"
                )
            if parameter.requires_grad and parameter not in self.owners:
                raise ConfigError(
                    f"{_words(i, name)} was frozen when ShardedOptimizer got it, so no rank updates it; "
                    "make a new ShardedOptimizer after unfreezing"
                )
        self._average([p for p in self.owners if self._averages(p)])
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner |= {key: value for key, value in outer.items() if key not in ("params", "param_names")}
        self.inner.step()
        self._exchange()

    def _named(self) -> list[tuple[Tensor, str]]:
        """Every parameter, frozen ones too, in the order of the state; the name is empty where none was given."""
        return [
            pair
            for group in self.param_groups
            for pair in zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True)
        ]

    def _averages(self, parameter: Tensor) -> bool:
        return reducer_of(parameter) is None if self.average_gradients is None else self.average_gradients

    def _average(self, parameters: list[Tensor]) -> None:
        """One gradient missing on some ranks counts as zero there; missing everywhere it stays None."""
        if not parameters or self.world_size == 1:
            return
        came = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
        comm.all_reduce_(came, tag="used", op="max", group=self.group).wait()
        used = [p for p, flag in zip(parameters, came.tolist(), strict=True) if flag]
        waits = []
        for i, chunk in enumerate([used[j] for j in indices] for indices in chunks(used)):
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in chunk]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            scale_for_average(flat, self.world_size)
            waits.append((chunk, flat, comm.all_reduce_(flat, tag=f"grad/chunk{i}", group=self.group)))
        for chunk, flat, pending in waits:
            pending.wait()
            for parameter, piece in zip(chunk, flat.split([p.numel() for p in chunk]), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(piece.view(parameter.shape))

    def _exchange(self) -> None:
        """Each owner sends its parameters, a few large messages at a time."""
        if self.world_size == 1:
            return
        waits = []
        for owner in range(self.world_size):
            owned = [p for p, its_owner in self.owners.items() if its_owner == owner]
            for i, chunk in enumerate([owned[j] for j in indices] for indices in chunks(owned)):
                flat = chunk[0].new_empty(sum(p.numel() for p in chunk))
                if owner == self.rank:
                    torch.cat([p.reshape(-1) for p in chunk], out=flat)
                tag = f"param/rank{owner}/chunk{i}"
                waits.append((owner, chunk, flat, comm.broadcast(flat, tag=tag, src=owner, group=self.group)))
        for owner, chunk, flat, pending in waits:
            pending.wait()
            if owner != self.rank:
                for parameter, piece in zip(chunk, flat.split([p.numel() for p in chunk]), strict=True):
                    parameter.copy_(piece.view(parameter.shape))

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Collective. In torch's form and complete on every rank, as the plain ``optimizer_cls`` would give it.

        Where others have state, a trainable parameter that no step has reached yet has an empty entry: it is not missing.
        """
        whole = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        described = {str(i): {key: _describe(v) for key, v in state.items()} for i, state in whole["state"].items()}
        everybodys = comm.all_gather_bytes(json.dumps(described).encode(), tag="state/keys", group=self.group)
        tables = [json.loads(text) for text in everybodys]
        mine, whole["state"] = whole["state"], {}
        for i, parameter in enumerate(parameters):
            owner = self.owners.get(parameter)
            if owner is None or not any(tables):
                continue
            whole["state"][i] = {
                key: self._receive(f"state/{key}", owner, parameter.device, mine.get(i, {}).get(key), *about)
                for key, about in tables[owner].get(str(i), {}).items()
            }
        return whole

    def _receive(
        self, tag: str, owner: int, device: torch.device, mine: Any, dtype: str | None, shape: list[int], value: Any
    ) -> Any:
        if dtype is None:
            return value
        if not shape:
            return torch.tensor(value, dtype=getattr(torch, dtype))
        held = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if owner == self.rank:
            held.copy_(mine)
        comm.broadcast(held, tag=tag, src=owner, group=self.group).wait()
        return held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` or the plain ``optimizer_cls`` gave, on any number of ranks. Moments keep their saved dtype.

        Raises:
            CheckpointError: groups or parameters do not fit; names the first. Nothing is changed then.
        """
        saved, states = state_dict["param_groups"], state_dict["state"]
        self._refuse_unfit(saved, states)
        loaded: dict[Tensor, dict[str, Any]] = {}
        for theirs, group in zip(saved, self.param_groups, strict=True):
            for i, parameter in zip(theirs["params"], group["params"], strict=True):
                if states.get(i) and self.owners.get(parameter) == self.rank:
                    loaded[parameter] = {k: _copy_for(parameter, group, k, value) for k, value in states[i].items()}
            group |= {key: value for key, value in theirs.items() if key not in ("params", "param_names")}
        self.state.clear()
        self.state.update(loaded)

    def _refuse_unfit(self, saved: list[dict[str, Any]], states: dict[Any, dict[str, Any]]) -> None:
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(f"the saved optimizer has groups of {sizes[0]} parameters, this one of {sizes[1]}")
        ids = [i for group in saved for i in group["params"]]
        unknown = next((i for i in states if i not in ids), None)
        if unknown is not None:
            raise CheckpointError(f"the saved optimizer has state for parameter {unknown}, this one has {len(ids)}")
        names = [name for group in saved for name in group.get("param_names", [""] * len(group["params"]))]
        labels = {}
        for i, theirs, (_, ours) in zip(ids, names, self._named(), strict=True):
            if theirs and ours and theirs != ours:
                raise CheckpointError(f"parameter {i} of the saved optimizer is {theirs}, of this one {ours}")
            labels[i] = _words(i, ours or theirs)
        for theirs, group in zip(saved, self.param_groups, strict=True):
            # an optimizer that looks at whole tensors may keep other things of a matrix than of a vector
            uniform = is_elementwise(self.inner, group)
            keys = list(dict.fromkeys(key for i in theirs["params"] for key in states.get(i, {})))
            for i, parameter in zip(theirs["params"], group["params"], strict=True):
                if i not in states and keys and parameter in self.owners:
                    raise CheckpointError(
                        f"the saved optimizer has no state for {labels[i]}; give it an empty entry if no step reached it"
                    )
                for key in keys if uniform and states.get(i) else ():
                    _refuse_entry(labels[i], key, states[i], parameter)


def _refuse_entry(label: str, key: str, state: dict[str, Any], parameter: Tensor) -> None:
    if key not in state:
        raise CheckpointError(f"the saved optimizer has no {key} for {label}")
    value = state[key]
    if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
        raise CheckpointError(
            f"saved {key} of {label} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
        )


def _words(i: Any, name: str) -> str:
    return f"parameter {i} ({name})" if name else f"parameter {i}"


def _copy_for(parameter: Tensor, group: dict[str, Any], key: str, value: Any) -> Any:
    """A copy on the device and with the strides that the optimizer expects; a step count only where its kernel reads it."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device if on_device else value.device, copy=True)
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.to(parameter.device, copy=True)


def _describe(value: Any) -> tuple[str | None, list[int], Any]:
    """Dtype and shape of a tensor of the state, and the value of a single number; no dtype for what is no tensor."""
    if not isinstance(value, Tensor):
        return None, [], value
    return str(value.dtype).removeprefix("torch."), list(value.shape), None if value.ndim else value.item()


def _refuse_duplicates(group: dict[str, Any], known: set[Tensor]) -> None:
    inside = group["params"]
    if not isinstance(inside, Tensor | set):  # a set is refused by torch
        inside = group["params"] = list(inside)  # a generator is used up by looking
    for entry in [inside] if isinstance(inside, Tensor) else inside:
        name, tensor = entry if isinstance(entry, tuple) else ("", entry)
        if tensor in known:
            what = f"parameter {name}" if name else f"a parameter of shape {tuple(tensor.shape)}"
            raise ConfigError(f"{what} is given twice; each parameter must be in one group once")
        known.add(tensor)
