"""What every context-parallel variant shares: a whole model on each rank, which works on some positions of all samples.

Everything in a layer but attention works on each position by itself, so a rank does it for its own and needs to know
nothing more; attention looks at the others' by the function that it is given. Each rank's loss is the sum over its own
positions, weighed as in one process: the ranks' losses add up, and so do their gradients, once a step. For the
gradients, ranks along this axis are replicas like those of data parallelism.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Attend, Attention, Embedding, Model
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica

# Positions: which part of a sequence each rank holds, and what its rows see of another rank's keys.
#
# Under a causal mask position p looks at p+1 keys: the last rows have the most to do. Cut in N runs, rank N-1 of N does
# (2N-1)/N times the mean. Cut in 2N and folded, so that rank r holds runs r and 2N-1-r, every rank holds one early and
# one late run, and all do the same (zig-zag; Llama 3's and Megatron-LM's cut). Both cuts have in common that what one
# rank's rows see of another rank's keys is a rectangle, with nothing in it left to mask:
#
#     contiguous   all rows see all keys of an earlier rank, and none of a later one's
#     zigzag       all rows see the first run of an earlier rank; the second run sees all of a later one's
#
# Any length will do: runs are as even as whole positions allow, and may be empty.


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


# The step.


class OwnRows(nn.Module):
    """`model` on the positions of `rank`: takes [B, S] of tokens and targets, and gives the loss of its own."""

    def __init__(self, model: Model, positions: Positions, rank: int) -> None:
        super().__init__()
        self.model, self.positions, self.rank = model, positions, rank

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(self.own(inputs), self.own(targets))
        return loss

    def own(self, x: Tensor) -> Tensor:
        """[B, S] to [B, rows]."""
        return self.positions.own(x, self.rank)


Rows: TypeAlias = Callable[[Model, Positions, int], nn.Module]


class ContextParallel(Replica):
    """A Strategy: `model` on this rank's positions, its gradients summed over `group`.

    Args:
        positions: which rank of the axis holds which.
        attend: what attention over all of them is: [B, heads, rows, head_dim] of q, k and v to as many.
        group: the ranks along the axis; with data parallelism beside it those of both together.
        rows: what cuts the samples.
        scale: multiplies the loss that is differentiated.
    """

    def __init__(
        self, model: Model, positions: Positions, attend: Attend, group: dist.ProcessGroup, config: Config, *,
        rank: int, rows: Rows = OwnRows, scale: float = 1.0,
    ) -> None:  # fmt: skip
        share_out(model, positions, attend, rank)
        buckets = GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20)
        super().__init__(model, config, buckets, forward=rows(model, positions, rank), scale=scale)


def share_out(model: Model, positions: Positions, attend: Attend, rank: int) -> None:
    """Let `model` work on the positions of `rank`, and attend to those of all ranks."""
    set_positions(model, positions, rank)
    for part in model.modules():
        if isinstance(part, Attention):
            part.attend = attend


def own_positions(microbatches: list[Microbatch], positions: Positions, rank: int) -> list[Microbatch]:
    """Of each microbatch the positions of `rank`."""
    return [
        Microbatch(positions.own(inputs, rank), positions.own(targets, rank), share)
        for inputs, targets, share in microbatches
    ]


def set_positions(model: Model, positions: Positions, rank: int) -> None:
    first = model.layers[0]
    assert isinstance(first, Embedding)
    first.positions = positions.of(rank, first.position.weight.device)
