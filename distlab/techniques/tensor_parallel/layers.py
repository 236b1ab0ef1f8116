"""Tensor parallelism: every rank computes a slice of each matrix product, on the same samples.

A product can be cut in two ways (Shoeybi et al. 2019, "Megatron-LM", section 3). By the rows of the weight, which are
its outputs: each rank gets some of the outputs, with nothing sent. By the columns, its inputs: each rank gets all
outputs, but only its part of their sum. One after the other they fit together, since what the first leaves on a rank is
what the second needs there, and whatever works on each output by itself may stand between: an activation, or a whole
attention head.

    y = W2 gelu(W1 x)        W1 by rows, W2 by columns: one sum over the ranks, after W2

What stands at the two ends is a pair of maps, each the other's transpose, so that a forward pass through one is a
backward pass through the other (`Region`):

                between slices              into a slice                        out of a slice
    Whole       everything on every rank    f: as it is; backward all_reduce    g: all_reduce; backward as it is
    Sequence    a part of the rows each     gather: all_gather;                 scatter: reduce_scatter;
                                            backward reduce_scatter             backward all_gather
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.workload.model import Attention, Embedding, Model
from distlab.techniques.collectives import by_hand, direct
from distlab.techniques.collectives.autograd import linear
from distlab.techniques.collectives.by_hand import Collective
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.sharded_tensor import LocalShard
from distlab.techniques.pipeline_parallel.zero_bubble import Product

# Slices: which part of a dense tensor each rank holds, and how the parts become the dense tensor again.
#
# Parts are runs along one dimension, as even as whole units allow (torch's tensor_split: the first ranks one more).
# The unit is a row or a column, or an attention head of several, which no rank may hold half of: 7 heads on 4 ranks
# are 2, 2, 2 and 1.


@dataclass(frozen=True)
class Slice:
    """Rank r holds `sizes[r]` of the dense tensor along `dim`, after those of the ranks before it."""

    dim: int
    sizes: tuple[int, ...]

    def piece(self, dense: Tensor, rank: int) -> Tensor:
        """The part of `dense` that `rank` holds: a copy, so that the dense tensor can go."""
        view = dense.detach().narrow(self.dim, self.first(rank), self.sizes[rank])
        return view.clone(memory_format=torch.contiguous_format)

    def place(self, part: Tensor, rank: int) -> LocalShard:
        """Where the part of `rank` stands in the dense tensor."""
        shape, offset = list(part.shape), [0] * part.dim()
        shape[self.dim], offset[self.dim] = sum(self.sizes), self.first(rank)
        return LocalShard(torch.Size(shape), [(tuple(offset), part)] if part.numel() else [])

    def placed(self, piece: LocalShard, rank: int) -> LocalShard:
        """The same for a piece of that part."""
        shape, first = list(piece.shape), self.first(rank)
        shape[self.dim] = sum(self.sizes)
        moved = [((*at[: self.dim], at[self.dim] + first, *at[self.dim + 1 :]), box) for at, box in piece.boxes]
        return LocalShard(torch.Size(shape), moved)

    def first(self, rank: int) -> int:
        return sum(self.sizes[:rank])


def shares(num_units: int, num_ranks: int, unit: int = 1) -> tuple[int, ...]:
    """Sizes of each rank's share of `num_units` units, each `unit` long."""
    each, more = divmod(num_units, num_ranks)
    return tuple((each + (rank < more)) * unit for rank in range(num_ranks))


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """The slice of each parameter that is not held whole, by its name: what each module says in its `slices`."""
    return {
        f"{name}.{parameter}" if name else parameter: part
        for name, module in model.named_modules()
        for parameter, part in getattr(module, "slices", {}).items()
    }


class Region(Protocol):
    """What stands before and after a part of the model whose ranks each compute a slice."""

    def enter(self, x: Tensor) -> Tensor:
        """What lies between blocks, [..., D], as each rank's slice needs it: all rows."""

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' `partial`, [..., D], as it lies between blocks."""


class Whole:
    """Every rank holds all activations between the blocks: Shoeybi's f and g."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """f."""
        return Copy.apply(x, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, partial: Tensor) -> Tensor:
        """g, in place of `partial`."""
        return Reduce.apply(partial, self.group)  # type: ignore[no-any-return, no-untyped-call]


class Copy(torch.autograd.Function):
    """f. Forward: identity. Backward: all_reduce, since every rank used x for its slice, and each has a part of the
    gradient.

    The gradient is summed where it stands. What follows has to make one that nobody else sees, as a linear layer does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0].contiguous(), ctx.group), None


class Reduce(torch.autograd.Function):
    """g. Forward: all_reduce, in place. Backward: identity, for the loss behind it is the same one on every rank."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(partial)
        return all_reduce(partial, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    with phase("all_reduce"):
        dist.all_reduce(x, group=group)
    return x


class ColumnParallelLinear(nn.Module):
    """This rank's outputs of a linear layer: [..., D] to [..., sizes[rank]].

    Named for the columns of the paper's x·A, which are the rows of torch's weight. x has come through `Region.enter`,
    once for all the layers that take it: one sum of gradients for q, k and v together.
    """

    def __init__(self, dense: nn.Linear, sizes: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self.slices = {name: Slice(0, sizes) for name, _ in dense.named_parameters()}
        self.weight = nn.Parameter(self.slices["weight"].piece(dense.weight, rank))
        self.bias = None if dense.bias is None else nn.Parameter(self.slices["bias"].piece(dense.bias, rank))
        self.product: Product = F.linear  # a pipeline may split its backward pass (pipeline.py)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)  # [..., D/tp]


class RowParallelLinear(nn.Module):
    """This rank's inputs of a linear layer: [..., sizes[rank]] to [..., D], which `region` sums over the ranks.

    The bias is whole on every rank and is added once, to the sum: added to each part it would count N times.
    """

    def __init__(self, dense: nn.Linear, sizes: tuple[int, ...], rank: int, region: Region) -> None:
        super().__init__()
        self.slices = {"weight": Slice(1, sizes)}
        self.region = region
        self.weight = nn.Parameter(self.slices["weight"].piece(dense.weight, rank))
        self.bias = None if dense.bias is None else nn.Parameter(dense.bias.detach().clone())
        self.product: Product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        total = self.region.leave(self.product(x, self.weight, None))  # [..., D]
        return total if self.bias is None else total.add_(self.bias)


# The two ends of a language model, cut by the rows of the vocabulary: embedding and cross-entropy.
#
# The largest matrices of a small model stand here, and with tied weights they are one, so both ends cut it alike.
# What a rank does not hold is another's: a token of another rank's rows adds zeros to the sum over the ranks; and of
# the scores, as many as the vocabulary for each token, none is ever sent. A softmax needs of the others only its
# maximum and its sum (Shoeybi et al. 2019, section 3: b·s numbers for b·s·v).


class VocabularyParallelEmbedding(nn.Module):
    """Tokens [rows, ...] to vectors [rows, ..., D], of which this rank holds some, summed by `region`."""

    def __init__(self, dense: nn.Embedding, sizes: tuple[int, ...], rank: int, region: Region) -> None:
        super().__init__()
        self.slices = {"weight": Slice(0, sizes)}
        self.region = region
        self.first = self.slices["weight"].first(rank)
        self.weight = nn.Parameter(self.slices["weight"].piece(dense.weight, rank))

    def forward(self, tokens: Tensor) -> Tensor:
        own, rows = own_tokens(tokens, self.first, len(self.weight))
        partial = self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        partial[own] = F.embedding(rows, self.weight)  # [..., D]
        return self.region.leave(partial)


class VocabularyParallelCrossEntropy(nn.Module):
    """Sum over all tokens of -log p(token), from this rank's scores [..., V/tp]; the same number on every rank."""

    def __init__(self, sizes: tuple[int, ...], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.first = Slice(0, sizes).first(group.rank())

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).flatten(0, -2)
        return CrossEntropy.apply(scores, targets.flatten(), self.first, self.group)  # type: ignore[no-untyped-call, no-any-return]


class CrossEntropy(torch.autograd.Function):
    """Forward: two all_reduces, of the maxima, then of sums and targets' scores. Backward: sends nothing."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        (own,), columns = own_tokens(targets, first, scores.shape[1])
        largest = scores.amax(dim=1)  # [B·S]
        with phase("all_reduce"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = scores - largest[:, None]
        both = shifted.new_zeros(2, len(targets))  # sums of exp(score), and the targets' scores
        both[1, own] = shifted[own, columns]
        torch.sum(shifted.exp_(), dim=1, out=both[0])
        all_reduce(both, group)
        ctx.save_for_backward(shifted.div_(both[0, :, None]), own, columns)
        return (both[0].log() - both[1]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, own, columns = ctx.saved_tensors
        probabilities = probabilities * gradients[0]
        probabilities[own, columns] -= gradients[0]
        return probabilities, None, None, None


def own_tokens(tokens: Tensor, first: int, num_rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Where those of `tokens` stand that are one of `num_rows` from `first` on, and which of these each is."""
    rows = tokens - first
    own = ((rows >= 0) & (rows < num_rows)).nonzero(as_tuple=True)
    return own, rows[own]


# Sequence parallelism: between the slices each rank keeps a part of the rows, not all of them.
#
# What stands between two slices, norms and residual sums, works on each row by itself; with f and g every rank does
# all of it and holds all of it. An all_reduce is a reduce_scatter and then an all_gather: stop between the two, let
# each rank work on its rows there, and go on where the next slice begins. The bytes are the same, the activations
# between the slices a t-th (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
# section 4.2.2). What every rank holds whole, but used on its rows alone, has a part of its gradient on each: a norm's
# gain, a row-parallel bias.

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
        # benchmarks.steps tp`). It takes equal chunks; others are sent by ours.
        self.scattering = Collective(
            group, SCATTERING[dist.get_backend(group)], {"direct": direct, "exchange": by_hand}
        )
        self.gathering = Collective(group, "backend")
        self.num_rows = 0

    def own(self, rows: Tensor) -> Tensor:
        """This rank's chunk of rows that all ranks hold. Backward: zeros for the others."""
        self.num_rows = len(rows)
        return rows.tensor_split(self.gathering.peers.world_size)[self.gathering.peers.rank]

    def enter(self, x: Tensor) -> Tensor:
        """The gather: own rows to all rows. Backward: reduce_scatter of the ranks' parts of the gradient."""
        num_rows = self.num_rows
        return linear(
            x,
            lambda chunk: all_gather(chunk, self.gathering, num_rows),
            lambda gradient: reduce_scatter(gradient, self.scattering),
        )

    def leave(self, partial: Tensor) -> Tensor:
        """The scatter: partial sums of all rows to sums of own rows. Backward: all_gather of their gradients."""
        num_rows = self.num_rows = len(partial)
        return linear(
            partial,
            lambda rows: reduce_scatter(rows, self.scattering),
            lambda gradient: all_gather(gradient, self.gathering, num_rows),
        )


def all_gather(chunk: Tensor, collective: Collective, num_rows: int) -> Tensor:
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


def sum_together(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum all `gradients` over the ranks in place, by one all_reduce."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    all_reduce(flat, group)
    for gradient, total in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


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
