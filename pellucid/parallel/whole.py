"""Matrices that are held by rows and updated whole: each has one owner, which gathers it for the optimizer's step.

W ranks. What rank r owns is ``W * part`` elements, the same on every rank with padding: the rows of each rank in turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.parallel import comm
from pellucid.parallel.layout import ParameterInfo, assign_whole, row_range, rows_each
from pellucid.parallel.parts import Rows


def section_numel(shape: Sequence[int], num_ranks: int) -> int:
    """Elements of a rank's rows of a matrix, padding included."""
    return rows_each(shape[0], num_ranks) * math.prod(shape[1:])


def part_numel(infos: Sequence[ParameterInfo], num_ranks: int) -> int:
    """Elements that each rank sends to each owner, padding included: what the most loaded owner gets."""
    sizes = [section_numel(info.shape, num_ranks) for info in infos]
    return max(sum(sizes[i] for i in mine) for mine in assign_whole(sizes, num_ranks))


@dataclass(slots=True)
class _Owned:
    """A matrix in the part of its owner; ``whole`` only there."""

    rows: Rows
    offset: int
    """First element of a rank's rows in what it sends to the owner."""
    numel: int
    whole: nn.Parameter | None


class WholeMatrices:
    """Matrices of one dtype. `gather` before the optimizer's step, `scatter` after it.

    Between steps the owner's ``whole`` has its shape and no memory.
    """

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.rank, self.world_size = comm.rank(), comm.world_size()
        self.like = rows[0].weight
        sizes = [section_numel(row.shape, self.world_size) for row in rows]
        self.by_owner: list[list[_Owned]] = []
        for owner, mine in enumerate(assign_whole(sizes, self.world_size)):
            offset, owned = 0, []
            for i in mine:
                whole = nn.Parameter(torch.empty(rows[i].shape, dtype=self.like.dtype, device=self.like.device))
                whole.untyped_storage().resize_(0)
                owned.append(_Owned(rows[i], offset, sizes[i], whole if owner == self.rank else None))
                offset += sizes[i]
            self.by_owner.append(owned)
        self.part = max(sum(one.numel for one in owned) for owned in self.by_owner)
        self.names = [row.name for row in rows]

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """What this rank updates, by name."""
        return {one.rows.name: one.whole for one in self.by_owner[self.rank] if one.whole is not None}

    @torch.no_grad()
    def gather(self) -> None:
        """Weights and gradients come from their rows; a matrix without a gradient keeps None."""
        weights = self._to_owners([one.rows.weight for owned in self.by_owner for one in owned], "matrix/weight")
        grads = self._to_owners([one.rows.weight.grad for owned in self.by_owner for one in owned], "matrix/grad")
        for one in self.by_owner[self.rank]:
            assert one.whole is not None
            one.whole.untyped_storage().resize_(one.whole.numel() * one.whole.element_size())
            one.whole.copy_(self._join(one, weights))
            # that of a rank without rows is an empty tensor, so all ranks say the same
            one.whole.grad = None if one.rows.weight.grad is None else self._join(one, grads)

    @torch.no_grad()
    def scatter(self) -> None:
        """New weights go back to their rows, and the owner's memory is free again."""
        sent = torch.zeros(self.world_size, self.part, dtype=self.like.dtype, device=self.like.device)
        for one in self.by_owner[self.rank]:
            assert one.whole is not None
            for rank in range(self.world_size):
                first, last = row_range(one.rows.shape[0], rank, self.world_size)
                piece = one.whole[first:last].reshape(-1)
                sent[rank, one.offset : one.offset + piece.numel()] = piece
            one.whole.grad = None
            one.whole.untyped_storage().resize_(0)
        received = torch.empty_like(sent)
        comm.all_to_all(sent.view(-1), received.view(-1), tag="matrix/new", owner=self.names).wait()
        for owner, owned in enumerate(self.by_owner):
            for one in owned:
                weight = one.rows.weight
                weight.copy_(received[owner, one.offset : one.offset + weight.numel()].view(weight.shape))

    def _to_owners(self, tensors: Sequence[Tensor | None], tag: str) -> Tensor:
        """Each owner gets every rank's rows of its matrices, ``[W, part]``."""
        sent = torch.zeros(self.world_size, self.part, dtype=self.like.dtype, device=self.like.device)
        places = [(owner, one) for owner, owned in enumerate(self.by_owner) for one in owned]
        for (owner, one), tensor in zip(places, tensors, strict=True):
            if tensor is not None:
                sent[owner, one.offset : one.offset + tensor.numel()] = tensor.detach().reshape(-1)
        received = torch.empty_like(sent)
        comm.all_to_all(sent.view(-1), received.view(-1), tag=tag, owner=self.names).wait()
        return received

    def _join(self, one: _Owned, received: Tensor) -> Tensor:
        shape = one.rows.shape
        padded = received[:, one.offset : one.offset + one.numel].reshape(-1, *shape[1:])
        return padded[: shape[0]].clone()
