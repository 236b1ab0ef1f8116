"""Tensor parallelism: every rank computes a slice of each matrix product, on the same samples.

A product can be cut in two ways (Shoeybi et al. 2019, "Megatron-LM", section 3). Cut by the rows of the weight, which
are its outputs, each rank computes some of the outputs and sends nothing. Cut by the columns, its inputs, each rank
computes a part of the sum that every output is. The two fit together: what the first leaves on a rank is what the
second needs there, and anything that works on each output by itself may stand between them, such as an activation or a
whole attention head.

    y = W2 gelu(W1 x)        W1 by rows, W2 by columns: one sum over the ranks, after W2

A `Region` says what lies between two such slices. Its maps into and out of a slice are each other's transpose: the
backward pass of one is the forward pass of the other.

                            between slices              into a slice                    out of a slice
    ReplicatedRegion        everything on every rank    f: identity;                    g: all_reduce;
                                                        backward all_reduce             backward identity
    SequenceParallelRegion  a part of the rows each     gather: all_gather;             scatter: reduce_scatter;
                                                        backward reduce_scatter         backward all_gather
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


class Region(Protocol):
    """What lies before and after a slice: the maps into it and out of it."""

    def enter(self, x: Tensor) -> Tensor:
        """Return all rows of `x` [..., D], as each rank's slice needs them."""

    def leave(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' `partial` [..., D], as it lies between blocks."""


class ReplicatedRegion:
    """Activations between blocks are replicated on every rank (f and g of Shoeybi et al.)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """Apply f."""
        return Copy.apply(x, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, partial: Tensor) -> Tensor:
        """Apply g, in place of `partial`."""
        return Reduce.apply(partial, self.group)  # type: ignore[no-any-return, no-untyped-call]


class Copy(torch.autograd.Function):
    """f. Forward: identity. Backward: all_reduce, since every rank used x for its slice, and each has a part of the
    gradient.

    The all_reduce overwrites the gradient that it is given. So the layer behind f has to return a fresh one, as a
    linear layer does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0].contiguous(), ctx.group), None


class Reduce(torch.autograd.Function):
    """g. Forward: all_reduce, in place. Backward: identity, because every rank computes the same loss behind it."""

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

    It is named for the columns of the paper's x·A, which are the rows of torch's weight. Its caller applies
    `Region.enter` to x, once for all layers that take x: one sum of gradients for q, k and v together.
    """

    def __init__(self, dense: nn.Linear, sizes: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self.slices = {name: Slice(0, sizes) for name, _ in dense.named_parameters()}
        self.weight = nn.Parameter(self.slices["weight"].piece(dense.weight, rank))
        self.bias = None if dense.bias is None else nn.Parameter(self.slices["bias"].piece(dense.bias, rank))
        self.product: Product = F.linear  # a pipeline may split its backward pass (zero_bubble.py)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)  # [..., D/tp]


class RowParallelLinear(nn.Module):
    """The outputs [..., D] of a linear layer from this rank's inputs [..., sizes[rank]]; `region` sums them over the
    ranks.

    Every rank holds the whole bias and adds it to the sum: added to each part it would count N times.
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
# They are the largest matrices of a small model. With tied weights they are one matrix, so both ends cut it in the
# same way. Where a token belongs to another rank's rows, this rank adds zeros to the sum over the ranks. The scores, as
# many as the vocabulary for each token, are never sent: a softmax needs only the maximum and the sum of the other
# ranks' scores (Shoeybi et al. 2019, section 3: b·s numbers in place of b·s·v).


class VocabularyParallelEmbedding(nn.Module):
    """The vectors [rows, ..., D] of tokens [rows, ...]; each rank holds some rows of the table, and `region` sums."""

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
    """The sum over all tokens of -log p(token), from this rank's scores [..., V/tp]; the same on every rank."""

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
    """Find the tokens between `first` and `first + num_rows`: their places in `tokens`, and their rows in the slice."""
    rows = tokens - first
    own = ((rows >= 0) & (rows < num_rows)).nonzero(as_tuple=True)
    return own, rows[own]


# Sequence parallelism: between the slices each rank keeps a part of the rows, not all of them.
#
# Norms and residual sums, which lie between two slices, work on each row by itself. With f and g every rank computes
# and holds all rows there. An all_reduce is a reduce_scatter followed by an all_gather: sequence parallelism stops
# between the two, lets each rank work on its own rows, and gathers where the next slice begins. It sends the same
# bytes, and the activations between slices are a t-th (Korthikanti et al. 2022, "Reducing Activation Recomputation in
# Large Transformer Models", section 4.2.2). A parameter that every rank holds whole but uses on its own rows, such as a
# norm's gain or a row-parallel bias, has a part of its gradient on each rank.

# How the rows are scattered, by backend.
SCATTERING = {"gloo": "exchange", "tcp": "direct", "nccl": "backend"}


class SequenceParallelRegion:
    """Rank r holds chunk r of the rows (dim 0: positions, or samples): Korthikanti's g and g-bar.

    The number of rows need not divide by that of ranks, and a chunk may be empty (the `tensor_split` of Collective).
    `own` and `leave`, which cut the rows, note their number for `enter`: call one of them before the first `enter`.
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
        """Return this rank's chunk of rows that all ranks hold. Backward: zeros for the other chunks."""
        self.num_rows = len(rows)
        return rows.tensor_split(self.gathering.peers.world_size)[self.gathering.peers.rank]

    def enter(self, x: Tensor) -> Tensor:
        """Gather all ranks' rows. Backward: reduce_scatter of the ranks' parts of the gradient."""
        num_rows = self.num_rows
        return linear(
            x,
            lambda chunk: all_gather(chunk, self.gathering, num_rows),
            lambda gradient: reduce_scatter(gradient, self.scattering),
        )

    def leave(self, partial: Tensor) -> Tensor:
        """Sum all ranks' partial rows, and return this rank's. Backward: all_gather of their gradients."""
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
    """Return this rank's chunk of the sum of all ranks' rows."""
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


def rows_first(model: Model, region: SequenceParallelRegion) -> None:
    """Put rows, which are sliced between blocks, in the first dimension: [B, S, ...] becomes [S, B, ...] in gpt.

    The rows of mlp are its samples, which are first already: the model's inputs and targets are sliced.
    """
    if model.name != "gpt":
        model.register_forward_pre_hook(lambda _, batch: tuple(region.own(rows) for rows in batch))
        return
    model.register_forward_pre_hook(lambda _, batch: tuple(rows.t() for rows in batch))
    rows_inside(model, region)


def rows_inside(model: Model, region: SequenceParallelRegion) -> None:
    """Let the layers of gpt take and return [S, B, ...]; the caller transposes the model's inputs."""
    for part in list(model.modules()):
        if isinstance(part, Attention):  # which computes on [B, S, D] between its projections
            for project in (part.q, part.k, part.v):
                project.register_forward_hook(lambda _, __, out: out.transpose(0, 1))
            part.o.register_forward_pre_hook(lambda _, args: args[0].transpose(0, 1))
    first = model.layers[0]
    assert isinstance(first, Embedding)
    model.layers[0] = RowsEmbedding(first, region)


class RowsEmbedding(nn.Module):
    """This rank's rows [S/tp, B, D] of the vectors of tokens [S, B]."""

    def __init__(self, embedding: Embedding, region: SequenceParallelRegion) -> None:
        super().__init__()
        self.token, self.position, self.region = embedding.token, embedding.position, region
        self.positions = embedding.positions

    def forward(self, tokens: Tensor) -> Tensor:
        positions = slice(len(tokens)) if self.positions is None else self.positions
        hidden: Tensor = self.token(tokens)
        return hidden + self.region.own(self.position.weight[positions])[:, None]


# Slices: which part of a dense tensor each rank holds, and where that part stands in the dense tensor.
#
# A part is a run along one dimension. Parts are as even as whole units allow (as torch's tensor_split: the first ranks
# get one more). A unit is a row or a column, or the rows of an attention head, which is never cut: 7 heads on 4 ranks
# are 2, 2, 2 and 1.


@dataclass(frozen=True)
class Slice:
    """Rank r holds `sizes[r]` of the dense tensor along `dim`, after those of the ranks before it."""

    dim: int
    sizes: tuple[int, ...]

    def piece(self, dense: Tensor, rank: int) -> Tensor:
        """Copy the part of `dense` that `rank` holds, so that the dense tensor can be freed."""
        view = dense.detach().narrow(self.dim, self.first(rank), self.sizes[rank])
        return view.clone(memory_format=torch.contiguous_format)

    def place(self, part: Tensor, rank: int) -> LocalShard:
        """Return the part of `rank` with its offset in the dense tensor."""
        shape, offset = list(part.shape), [0] * part.dim()
        shape[self.dim], offset[self.dim] = sum(self.sizes), self.first(rank)
        return LocalShard(torch.Size(shape), [(tuple(offset), part)] if part.numel() else [])

    def placed(self, piece: LocalShard, rank: int) -> LocalShard:
        """Do the same for a piece of that part."""
        shape, first = list(piece.shape), self.first(rank)
        shape[self.dim] = sum(self.sizes)
        moved = [
            ((*offset[: self.dim], offset[self.dim] + first, *offset[self.dim + 1 :]), box)
            for offset, box in piece.boxes
        ]
        return LocalShard(torch.Size(shape), moved)

    def first(self, rank: int) -> int:
        return sum(self.sizes[:rank])


def partition_sizes(num_units: int, num_ranks: int, unit: int = 1) -> tuple[int, ...]:
    """Share out `num_units` units, each `unit` long; return the size of each rank's part."""
    each, more = divmod(num_units, num_ranks)
    return tuple((each + (rank < more)) * unit for rank in range(num_ranks))


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """Return the slice of each parameter that is not held whole, by name, from the modules' `slices`."""
    return {
        f"{name}.{parameter}" if name else parameter: part
        for name, module in model.named_modules()
        for parameter, part in getattr(module, "slices", {}).items()
    }
