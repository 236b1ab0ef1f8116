"""Positions: which part of a sequence each rank holds, and what its rows see of another rank's keys.

Under a causal mask position p looks at p+1 keys: the last rows have the most to do. Cut in N runs, rank N-1 of N does
(2N-1)/N times the mean. Cut in 2N and folded, so that rank r holds runs r and 2N-1-r, every rank holds one early and
one late run, and all do the same (zig-zag; Llama 3's and Megatron-LM's cut). Both cuts have in common that what one
rank's rows see of another rank's keys is a rectangle, with nothing in it left to mask:

    contiguous   all rows see all keys of an earlier rank, and none of a later one's
    zigzag       all rows see the first run of an earlier rank; the second run sees all of a later one's

Any length will do: runs are as even as whole positions allow, and may be empty.
"""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor


class VisibleKeys(NamedTuple):
    """Rows from `first_row` on see the first `num_keys` keys; no other row sees any."""

    first_row: int
    num_keys: int


@dataclass(frozen=True)
class Positions:
    """`runs[r]` are the positions of rank r, in ascending order; together they are all of the sequence."""

    runs: tuple[tuple[range, ...], ...]

    @property
    def length(self) -> int:
        """Of the whole sequence."""
        return sum(self.num_rows)

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Positions of each rank."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    def of(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions of `rank`, [rows]."""
        return torch.tensor(list(chain(*self.runs[rank])), dtype=torch.long, device=device)

    def own(self, x: Tensor, rank: int) -> Tensor:
        """The rows of `rank` of what all positions have, [B, S, ...] to [B, rows, ...]; a copy."""
        return torch.cat([x[:, run.start : run.stop] for run in self.runs[rank]], 1)

    def seen(self, rank: int, other: int) -> VisibleKeys:
        """What the rows of `rank` see of the keys of another rank."""
        rows, keys = ([run for run in self.runs[each] if run] for each in (rank, other))
        # Runs do not overlap, so that one comes before another or behind it, as a whole.
        sees = [[key.start < row.start for key in keys] for row in rows]
        first_row = sum(len(row) for row, seen in zip(rows, sees, strict=True) if not any(seen))
        num_keys = sum(len(key) for key, seen in zip(keys, sees[-1], strict=True) if seen) if rows else 0
        return VisibleKeys(first_row, num_keys)

    def pairs(self, rank: int) -> int:
        """How often a row of `rank` looks at a key, itself included: the causal work of one head and sample."""
        return sum(position + 1 for position in chain(*self.runs[rank]))


def contiguous(length: int, num_ranks: int) -> Positions:
    """Rank r holds run r of N."""
    return Positions(tuple((run,) for run in cut(length, num_ranks)))


def zigzag(length: int, num_ranks: int) -> Positions:
    """Rank r holds runs r and 2N-1-r of 2N."""
    runs = cut(length, 2 * num_ranks)
    return Positions(tuple((runs[rank], runs[2 * num_ranks - 1 - rank]) for rank in range(num_ranks)))


def cut(length: int, num_runs: int) -> list[range]:
    """Runs as even as it goes, the first ones a position longer (torch's tensor_split)."""
    each, more = divmod(length, num_runs)
    starts = [index * each + min(index, more) for index in range(num_runs + 1)]
    return [range(*starts[index : index + 2]) for index in range(num_runs)]
