"""What modes share in which each rank holds rows of the parameters: gradients, their norm, and checkpoints.

W ranks.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.errors import ConfigError
from pellucid.parallel import comm
from pellucid.parallel.executor import Executor, norms
from pellucid.parallel.layout import rows_each
from pellucid.parallel.optimizer_state import load_state, state_parts
from pellucid.parallel.parts import Part, Rows, SavedTensors, check_weights
from pellucid.parallel.sharded_optimizer import ShardedOptimizer
from pellucid.parallel.whole import WholeMatrices


class RowExecutor(Executor):
    """Base of the modes that shard weights; they set `rows`."""

    rows: list[Rows]
    whole: list[WholeMatrices]
    held: dict[str, nn.Parameter]
    """What the optimizer has on this rank, by name."""

    def _refuse_world(self) -> None: ...

    def _refuse_optimizer(self, mode: str) -> None:
        if isinstance(self.optimizer, ShardedOptimizer):
            raise ConfigError(
                f"parallel.mode {mode} shards the optimizer itself; give it a plain one, or take mode ddp"
            )

    def _hand_over(self, optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
        """Give the optimizer this rank's rows in place of the parameters, with what state it has.

        What it updates whole it gets whole, on one rank each.
        """
        rows = {row.name: row for row in self.rows}
        by_dtype: dict[torch.dtype, list[Rows]] = {}
        for info in self.infos:
            if info.trainable and not info.elementwise and not rows[info.name].replicated:
                by_dtype.setdefault(info.dtype, []).append(rows[info.name])
        self.whole = [WholeMatrices(same) for same in by_dtype.values()]
        owned = {name: parameter for matrices in self.whole for name, parameter in matrices.owned.items()}
        elsewhere = {row.name for same in by_dtype.values() for row in same} - set(owned)
        self.held = {name: owned.get(name, row.weight) for name, row in rows.items() if name not in elsewhere}
        before = {names[p]: state for p, state in optimizer.state.items() if p in names}
        optimizer.state.clear()
        for group in optimizer.param_groups:
            mine = [names[p] for p in group["params"] if names.get(p) in self.held]
            group["params"] = [self.held[name] for name in mine]
            if "param_names" in group:
                group["param_names"] = mine
        for name, state in before.items():
            if name in self.held:
                optimizer.state[self.held[name]] = {key: self._cut(rows[name], v) for key, v in state.items()}

    def _cut(self, row: Rows, value: Any) -> Any:
        """What this rank keeps of an entry of the optimizer's state."""
        held = self.held[row.name]
        if not isinstance(value, Tensor) or value.shape != row.shape or held.shape == row.shape:
            return value
        return value.reshape(-1)[row.start : row.start + held.numel()].clone().view(held.shape)

    def step(self) -> None:
        if self.sync_gradients:
            self.finish_grads()
            comm.enter("optimizer")
            for matrices in self.whole:
                matrices.gather()
        super().step()

    def _finish_weights(self) -> None:
        for matrices in self.whole:
            matrices.scatter()

    def gradients(self) -> Iterator[Part]:
        """Rows; of a replicated parameter, the first rank's."""
        for row in self._own_rows():
            if row.weight.grad is not None:
                yield Part(row.name, row.shape, row.start, row.weight.grad)

    def _own_rows(self) -> Iterator[Rows]:
        """Those that together over ranks are the model, each element once."""
        for row in self.rows:
            if row.weight.numel() and (comm.rank() == 0 or not row.replicated):
                yield row

    @property
    def shards_gradients(self) -> bool:
        return True

    def _grads(self) -> list[Tensor]:
        return [row.weight.grad for row in self.rows if row.weight.grad is not None]

    def grad_norm(self) -> float:
        self.finish_grads()
        grads = [part.tensor for part in self.gradients()]
        mine = norms(grads).double() if grads else torch.zeros(1)
        return math.sqrt(comm.all_reduce(float(mine.square().sum()), tag="grad_norm"))

    def add_to_weight(self, name: str, delta: Tensor) -> None:
        row = next(row for row in self.rows if row.name == name)
        mine = delta.flatten()[row.start : row.start + row.weight.numel()].view(row.weight.shape)
        with torch.no_grad():
            row.weight.add_(mine.to(row.weight.device, row.weight.dtype))

    # -- checkpoints ----------------------------------------------------------------------------------------

    shards_state = True
    shards_weights = True

    def optimizer_parts(self) -> Iterator[Part]:
        _, optimizer = self._checkpointed()
        rows = {row.name: row for row in self.rows}
        for name, held in self.held.items():
            row = rows[name]
            if held.numel() and (comm.rank() == 0 or not row.replicated):
                start = row.start if held is row.weight else 0
                yield from state_parts(name, row.shape, start, held, optimizer.state.get(held, {}))

    def load_optimizer_state(self, saved: SavedTensors) -> None:
        _, optimizer = self._checkpointed()
        rows = {row.name: row for row in self.rows}
        slices = [
            (name, rows[name].start if held is rows[name].weight else 0, held)
            for name, held in self.held.items()
            if name in self.optimized
        ]
        load_state(optimizer, slices, saved, {row.name: row.shape for row in self.rows}, self.optimized)

    def weight_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        named = ((row.name, (row.shape, row.weight.dtype)) for row in self.rows)
        return dict(sorted(named, key=lambda item: -item[1][1].itemsize))

    def held_weights(self) -> Iterator[Part]:
        for row in self.rows:
            yield Part(row.name, row.shape, row.start, row.weight.detach())

    def weights(self, of: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        rows = {row.name: row for row in self.rows}
        held = {name: row.weight.detach() for name, row in rows.items()} if of is None else of
        for name in self.weight_shapes():
            if name in held:
                yield name, held[name] if rows[name].replicated else self._gather(rows[name], held[name])

    def _gather(self, row: Rows, rows: Tensor) -> Tensor | None:
        """A whole weight on the first rank, None elsewhere, from the ``rows`` that each rank has of it."""
        mine = rows.reshape(-1)
        section = rows_each(row.shape[0], comm.world_size()) * math.prod(row.shape[1:])
        if mine.numel() < section:
            mine = torch.cat([mine, mine.new_zeros(section - mine.numel())])
        full = mine.new_empty(mine.numel() * comm.world_size()) if comm.rank() == 0 else None
        comm.gather(mine, full, tag="save/weight", owner=[row.name]).wait()
        return None if full is None else full[: math.prod(row.shape)].view(row.shape)

    def load_weights(self, saved: SavedTensors) -> None:
        check_weights(saved, {row.name: row.shape for row in self.rows})
        with torch.no_grad():
            for row in self.rows:
                piece = saved.read(row.name, row.start, row.start + row.weight.numel())
                row.weight.copy_(piece.view(row.weight.shape))
