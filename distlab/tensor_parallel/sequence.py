"""Sequence parallelism: between the slices of tensor parallelism each rank keeps a part of the rows, not all of them.

What stands between two slices, norms and residual sums, works on each row by itself; with f and g every rank does all
of it and holds all of it. An all_reduce is a reduce_scatter and then an all_gather: stop between the two, let each rank
work on its rows there, and go on where the next slice begins. The bytes are the same, the activations between the
slices a t-th (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2).

What every rank holds whole, but used on its rows alone, has a part of its gradient on each: a norm's gain, a
row-parallel bias.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.collectives import by_hand, direct
from distlab.collectives.by_hand import Collective
from distlab.collectives.phases import phase
from distlab.workload.model import Attention, Embedding, Model

# How the rows are scattered, by backend.
SCATTERING = {"gloo": "exchange", "tcp": "direct", "nccl": "backend"}


class Sequence:
    """Rank r holds chunk r of the rows (dim 0: positions, or samples): Korthikanti's g and g-bar.

    Any number of rows will do, and a chunk may be empty (the `tensor_split` of Collective). How many there are is noted
    where they are cut, by `own` and `leave`, so one of them has to stand before the first `enter` of a forward pass.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # gloo's reduce_scatter is an all_reduce and a slice; its all_to_all, summed by us, sends half as much. Its
        # all_gather is as good as ours, and at 2 ranks better: a step was 0.88x DTensor's in place of 0.94x (`python -m
        # benchmarks.tp`). It takes equal chunks; others are sent by ours.
        self.scattering = Collective(
            group, SCATTERING[dist.get_backend(group)], {"direct": direct, "exchange": by_hand}
        )
        self.gathering = Collective(group, "backend")
        self.num_rows = 0

    def own(self, rows: Tensor) -> Tensor:
        """This rank's chunk of rows that all ranks hold. Backward: zeros for the others, whose gradients are
        elsewhere."""
        self.num_rows = len(rows)
        return rows.tensor_split(self.gathering.peers.world_size)[self.gathering.peers.rank]

    def enter(self, x: Tensor) -> Tensor:
        """The gather: own rows to all rows."""
        return Gather.apply(x, self, self.num_rows)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, partial: Tensor) -> Tensor:
        """The scatter: partial sums of all rows to sums of own rows."""
        self.num_rows = len(partial)
        return Scatter.apply(partial, self)  # type: ignore[no-any-return, no-untyped-call]


class Gather(torch.autograd.Function):
    """Korthikanti's g. Forward: all_gather of the rows. Backward: reduce_scatter of the ranks' parts of the
    gradient."""

    @staticmethod
    def forward(ctx: Any, chunk: Tensor, region: Sequence, num_rows: int) -> Tensor:
        ctx.region = region
        return all_gather(chunk, region.gathering, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradients[0], ctx.region.scattering), None, None


class Scatter(torch.autograd.Function):
    """Korthikanti's g-bar. Forward: reduce_scatter of the rows. Backward: all_gather of the chunks' gradients."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, region: Sequence) -> Tensor:
        ctx.region, ctx.num_rows = region, len(partial)
        return reduce_scatter(partial, region.scattering)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], ctx.region.gathering, ctx.num_rows), None


def all_gather(chunk: Tensor, collective: Collective, num_rows: int) -> Tensor:
    """All ranks' chunks, one after the other."""
    rows = chunk.new_empty(num_rows, *chunk.shape[1:])
    with phase("all_gather"):
        collective.all_gather(rows, chunk.contiguous())
    return rows


def reduce_scatter(rows: Tensor, collective: Collective) -> Tensor:
    """This rank's chunk of the sum of all ranks' rows."""
    peers = collective.peers
    chunk = torch.empty_like(rows.tensor_split(peers.world_size)[peers.rank], memory_format=torch.contiguous_format)
    with phase("reduce_scatter"):
        collective.reduce_scatter(chunk, rows.contiguous())
    return chunk


def sum_together(gradients: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """All `gradients` summed over the ranks in one all_reduce; the sums are views of one flat tensor."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([gradient.numel() for gradient in gradients])
    return [piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True)]


# What sequence parallelism needs beside its region: rows come first in what a model works on, for they are sliced.


def rows_first(model: Model, region: Sequence) -> None:
    """Turn what the model works on: [B, S, ...] becomes [S, B, ...] in gpt, whose rows between blocks are sliced.

    The rows of mlp are its samples, and come first already: they are sliced where they come in, and the targets too.
    """
    if model.name != "gpt":
        model.register_forward_pre_hook(lambda _, batch: tuple(region.own(rows) for rows in batch))
        return
    model.register_forward_pre_hook(lambda _, batch: tuple(rows.t() for rows in batch))
    rows_inside(model, region)


def rows_inside(model: Model, region: Sequence) -> None:
    """The layers of gpt take [S, B, ...] and give it; who runs them turns what comes in."""
    for part in list(model.modules()):
        if isinstance(part, Attention):  # between its projections it knows no other order than [B, S, D]
            for project in (part.q, part.k, part.v):
                project.register_forward_hook(lambda _, __, out: out.transpose(0, 1))
            part.o.register_forward_pre_hook(lambda _, args: args[0].transpose(0, 1))
    first = model.layers[0]
    assert isinstance(first, Embedding)
    model.layers[0] = RowsEmbedding(first, region)


class RowsEmbedding(nn.Module):
    """Bytes [S, B] to this rank's rows of vectors, [S/tp, B, D]."""

    def __init__(self, embedding: Embedding, region: Sequence) -> None:
        super().__init__()
        self.token, self.position, self.region = embedding.token, embedding.position, region
        self.positions = embedding.positions

    def forward(self, tokens: Tensor) -> Tensor:
        at = slice(len(tokens)) if self.positions is None else self.positions
        hidden: Tensor = self.token(tokens)
        return hidden + self.region.own(self.position.weight[at])[:, None]
