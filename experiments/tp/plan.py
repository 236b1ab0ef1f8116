"""The plan: which layer of the model becomes which parallel layer, and what stands where a slice begins and ends.

    Embedding     token by rows of the vocabulary -> leave;  position whole
    Attention     enter -> q, k, v by rows, whole heads;  o by columns, the same heads -> leave
    MLP           enter -> up by rows;  down by columns -> leave
    Head          norm whole;  enter -> project by rows of the vocabulary
    CrossEntropy  over the ranks' scores, which are never gathered

One `enter` serves q, k and v: it is a hook on the attention that they belong to, so that the names of all parameters stay as
they were. Tied weights stay tied, since both ends are cut by the same rows.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from workers.parallel.cut import shares
from workers.parallel.sequence import Sequence
from workers.parallel.tensor import ColumnParallelLinear, RowParallelLinear, Seams
from workers.parallel.vocabulary import VocabularyParallelCrossEntropy, VocabularyParallelEmbedding
from workers.workload.model import MLP, VOCABULARY, Attention, Embedding, Head, Model


def split(
    model: Model, group: dist.ProcessGroup, seams: Seams, row: type[RowParallelLinear] = RowParallelLinear
) -> None:
    """Replace the layers of a dense `model` by this rank's parts of them, in place."""
    rank, ranks = group.rank(), group.size()
    for part in list(model.modules()):
        if isinstance(part, Attention):
            heads = shares(part.q.out_features // part.head_dim, ranks, part.head_dim)
            for name, dense in {"q": part.q, "k": part.k, "v": part.v}.items():
                part.register_module(name, ColumnParallelLinear(dense, heads, rank))
            part.register_module("o", row(part.o, heads, rank, seams))
            enter_before(part, seams)
        elif isinstance(part, MLP):
            sizes = shares(part.up.out_features, ranks)
            part.register_module("up", ColumnParallelLinear(part.up, sizes, rank))
            part.register_module("down", row(part.down, sizes, rank, seams))
            enter_before(part, seams)
    if model.name == "gpt":
        split_vocabulary(model, group, seams)


def split_vocabulary(model: Model, group: dist.ProcessGroup, seams: Seams) -> None:
    """Both ends of gpt."""
    rank, sizes = group.rank(), shares(VOCABULARY, group.size())
    first, last = model.layers[0], model.layers[-1]
    assert isinstance(first, Embedding)
    assert isinstance(last, Head)
    tied = last.project.weight is first.token.weight
    token = VocabularyParallelEmbedding(first.token, sizes, rank, seams)
    project = ColumnParallelLinear(last.project, sizes, rank)
    if tied:
        project.weight = token.weight
    first.register_module("token", token)
    last.register_module("project", project)
    enter_before(project, seams)
    model.loss = VocabularyParallelCrossEntropy(sizes, group)


def enter_before(module: nn.Module, seams: Seams) -> None:
    """What `module` is given comes through `seams.enter` first."""
    module.register_forward_pre_hook(partial(_entered, seams))


def _entered(seams: Seams, _: nn.Module, args: tuple[Any, ...]) -> Tensor:
    return seams.enter(args[0])


# --- what `sequence` needs beside: rows come first, since rows are what is cut ---


def rows_first(model: Model, seams: Sequence) -> None:
    """Turn what the model works on: [B, S, ...] becomes [S, B, ...] in gpt, of which the rows between blocks are cut.

    The rows of mlp are its samples, and come first already: they are cut where they come in, and the targets too.
    """
    if model.name != "gpt":
        model.register_forward_pre_hook(lambda _, batch: tuple(seams.own(rows) for rows in batch))
        return
    model.register_forward_pre_hook(lambda _, batch: tuple(rows.t() for rows in batch))
    for part in list(model.modules()):
        if isinstance(part, Attention):  # between its projections it knows no other order than [B, S, D]
            for project in (part.q, part.k, part.v):
                project.register_forward_hook(lambda _, __, out: out.transpose(0, 1))
            part.o.register_forward_pre_hook(lambda _, args: args[0].transpose(0, 1))
    first = model.layers[0]
    assert isinstance(first, Embedding)
    model.layers[0] = RowsEmbedding(first, seams)


class RowsEmbedding(nn.Module):
    """Bytes [S, B] to this rank's rows of vectors, [S/tp, B, D]."""

    def __init__(self, embedding: Embedding, seams: Sequence) -> None:
        super().__init__()
        self.token, self.position, self.seams = embedding.token, embedding.position, seams

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.token(tokens)
        return hidden + self.seams.own(self.position.weight[: len(tokens)])[:, None]
