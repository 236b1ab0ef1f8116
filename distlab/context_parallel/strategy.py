"""What every context-parallel variant shares: a whole model on each rank, which works on some positions of all samples.

Everything in a layer but attention works on each position by itself, so a rank does it for its own and needs to know
nothing more; attention looks at the others' by the function that it is given. Each rank's loss is the sum over its own
positions, weighed as in one process: the ranks' losses add up, and so do their gradients, once a step. For the
gradients, ranks along this axis are replicas like those of data parallelism.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from distlab.config import Config
from distlab.context_parallel.positions import Positions
from distlab.data_parallel.buckets import GradientBuckets
from distlab.data_parallel.strategy import Replica
from distlab.pipeline_parallel.strategy import Engine
from distlab.workload.data import Microbatch
from distlab.workload.model import Attend, Attention, Embedding, Model


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


class OfOwnPositions:
    """An Engine that gives `engine` this rank's positions of each microbatch."""

    def __init__(self, engine: Engine, positions: Positions, rank: int) -> None:
        self.engine, self.positions, self.rank = engine, positions, rank

    @property
    def most_in_flight(self) -> int | None:
        return self.engine.most_in_flight

    def step(self, microbatches: list[Microbatch]) -> Tensor | None:
        own = [
            Microbatch(self.positions.own(inputs, self.rank), self.positions.own(targets, self.rank), share)
            for inputs, targets, share in microbatches
        ]
        return self.engine.step(own)


def set_positions(model: Model, positions: Positions, rank: int) -> None:
    """Tell the embedding where the tokens of `rank` stand."""
    first = model.layers[0]
    assert isinstance(first, Embedding)
    first.positions = positions.of(rank, first.position.weight.device)
