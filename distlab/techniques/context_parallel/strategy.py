"""The step of every context-parallel variant: each rank has the whole model, and some positions of every sample.

Everything in a layer except attention works on each position by itself, so a rank computes it for its own positions.
Attention also needs the other ranks' keys and values; variants differ in how it gets them. Each rank's loss is the sum
over its own positions, weighed as in one process: the ranks' losses add up, and so do their gradients, once per step.
For the gradients the ranks are replicas, as in data parallelism.
"""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Attend, Attention, Embedding, Model
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica


class ContextParallel(Replica):
    """A Strategy: `model` on this rank's positions, its gradients summed over `group`.

    Args:
        positions: the positions of each rank of the axis.
        attend: attention over all positions, from q, k and v [B, heads, rows, head_dim] to a result of that shape.
        group: the ranks along the axis; with data parallelism, those along both axes.
        rank: this rank's index along the axis.
    """

    def __init__(
        self, model: Model, positions: "Positions", attend: Attend, group: dist.ProcessGroup, config: Config, *,
        rank: int,
    ) -> None:  # fmt: skip
        parallelize(model, positions, attend, rank)
        super().__init__(model, config, GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20))
        self.positions, self.rank = positions, rank

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Forward and backward of this rank's positions."""
        return super().backward(own_positions(microbatches, self.positions, self.rank))


def parallelize(model: Model, positions: "Positions", attend: Attend, rank: int) -> None:
    """Let `model` work on the positions of `rank`, and attend to those of all ranks."""
    set_positions(model, positions, rank)
    for part in model.modules():
        if isinstance(part, Attention):
            part.attend = attend


def own_positions(microbatches: list[Microbatch], positions: "Positions", rank: int) -> list[Microbatch]:
    """Cut each microbatch to the positions of `rank`."""
    return [
        Microbatch(positions.own(inputs, rank), positions.own(targets, rank), share)
        for inputs, targets, share in microbatches
    ]


def set_positions(model: Model, positions: "Positions", rank: int) -> None:
    """Let the embedding look up the positions of `rank`."""
    first = model.layers[0]
    assert isinstance(first, Embedding)
    first.positions = positions.of(rank, first.position.weight.device)


# Positions: which part of a sequence each rank has, and which keys of another rank its rows see.
#
# Under a causal mask position p sees p+1 keys, so the last positions have the most work. With N contiguous runs, rank
# N-1 of N does (2N-1)/N times the mean. With 2N runs, of which rank r has runs r and 2N-1-r, every rank has one early
# and one late run, and all do equal work (zig-zag; Llama 3's and Megatron-LM's cut). In both cuts the part of another
# rank's keys that this rank's rows see is a rectangle of the score matrix, with nothing in it to mask:
#
#     contiguous   all rows see all keys of an earlier rank, and none of a later one's
#     zigzag       all rows see the first run of an earlier rank; the second run sees all of a later one's
#
# The length need not divide by the number of ranks: runs are as even as possible, and may be empty.


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
        """Return the number of positions of the whole sequence."""
        return sum(self.num_rows)

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Return the number of positions of each rank."""
        return tuple(sum(map(len, runs)) for runs in self.runs)

    def of(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of `rank`, [rows]."""
        return torch.tensor(list(chain(*self.runs[rank])), dtype=torch.long, device=device)

    def own(self, x: Tensor, rank: int) -> Tensor:
        """Copy the rows of `rank` out of all positions', [B, S, ...] to [B, rows, ...]."""
        return torch.cat([x[:, run.start : run.stop] for run in self.runs[rank]], 1)

    def visible_keys(self, rank: int, other: int) -> VisibleKeys:
        """Return which keys of the rank `other` the rows of `rank` see."""
        rows, keys = ([run for run in self.runs[each] if run] for each in (rank, other))
        # Runs do not overlap: one lies before the other, or behind it, as a whole.
        sees = [[key.start < row.start for key in keys] for row in rows]
        first_row = sum(len(row) for row, seen in zip(rows, sees, strict=True) if not any(seen))
        num_keys = sum(len(key) for key, seen in zip(keys, sees[-1], strict=True) if seen) if rows else 0
        return VisibleKeys(first_row, num_keys)

    def pairs(self, rank: int) -> int:
        """Count the (row, key) pairs of `rank` under a causal mask: its work for one head and sample."""
        return sum(position + 1 for position in chain(*self.runs[rank]))


def contiguous(length: int, num_ranks: int) -> Positions:
    """Give rank r run r of N."""
    return Positions(tuple((run,) for run in cut(length, num_ranks)))


def zigzag(length: int, num_ranks: int) -> Positions:
    """Give rank r runs r and 2N-1-r of 2N."""
    runs = cut(length, 2 * num_ranks)
    return Positions(tuple((runs[rank], runs[2 * num_ranks - 1 - rank]) for rank in range(num_ranks)))


def cut(length: int, num_runs: int) -> list[range]:
    """Return runs as even as possible, the first ones a position longer (as torch's tensor_split)."""
    each, more = divmod(length, num_runs)
    starts = [index * each + min(index, more) for index in range(num_runs + 1)]
    return [range(*starts[index : index + 2]) for index in range(num_runs)]
