"""Rows that begin alike, computed once: answers to a prompt share it, and those that agree for a while share that too.

What the model makes of a token depends on the tokens up to it and on nothing else. So one token for each distinct prefix of
the rows goes through everything that is token-wise, which is all but attention; attention sees whole rows.

R rows, T tokens of a row, N distinct prefixes, H heads, d head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.model.canonical import MATMUL_ROWS


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The distinct prefixes of rows ``[R, T]``. A few that stand nowhere may follow: fewer than 16 tokens round otherwise."""

    tokens: Tensor
    """int64 ``[N]``, the last token of each."""
    positions: Tensor
    """int64 ``[N]``, of that token in its row."""
    rows: Tensor
    """int64 ``[R, T]``, the prefix that ends at each place; 0 in padding."""
    places: Tensor
    """int64 ``[N]``, where each ends, in the flattened rows: one place of several."""
    count: int
    """Of those that stand somewhere."""

    def to(self, device: torch.device) -> "Prefixes":
        """The same on another device."""
        tokens, positions = self.tokens.to(device), self.positions.to(device)
        return Prefixes(tokens, positions, self.rows.to(device), self.places.to(device), self.count)


def find_prefixes(tokens: Tensor, real: Tensor) -> Prefixes:
    """Those of rows ``[R, T]`` of ids.

    Args:
        real: bool ``[R, T]``; padding stands at the end of a row.
    """
    numbers: dict[tuple[int, int], int] = {}  # by the prefix before, -1 for none, and the token
    rows = torch.zeros_like(tokens)
    ids, positions, places = list[int](), list[int](), list[int]()
    for row, (given, length) in enumerate(zip(tokens.tolist(), real.sum(1).tolist(), strict=True)):
        number, ended = -1, list[int]()
        for position, token in enumerate(given[:length]):
            number = numbers.setdefault((number, token), len(ids))
            if number == len(ids):
                ids.append(token)
                positions.append(position)
                places.append(row * tokens.shape[1] + position)
            ended.append(number)
        rows[row, :length] = torch.tensor(ended, dtype=torch.int64)
    fill = [0] * max(0, MATMUL_ROWS - len(ids))
    filled = [torch.tensor(column + fill) for column in (ids, positions, places)]
    return Prefixes(filled[0], filled[1], rows, filled[2], len(ids))


def all_apart(tokens: Tensor, positions: Tensor) -> Prefixes:
    """Those of rows ``[R, T]`` of which no two begin alike; looks at no values."""
    every = torch.arange(tokens.numel(), device=tokens.device)
    return Prefixes(tokens.flatten(), positions.flatten(), every.view(tokens.shape), every, tokens.numel())
