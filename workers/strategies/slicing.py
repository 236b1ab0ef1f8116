"""The lab's layers, sliced by tensor parallelism: a dense model, and in its place what one rank computes of it.

The two linear layers of a slice stand in workers/parallel/tensor.py, the two ends of gpt in
workers/parallel/vocabulary.py; here they take the places of the model's own. What lies between two slices is the
caller's: everything on every rank, or a part of the rows (rows.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from workers.parallel.slices import shares
from workers.parallel.tensor import ColumnParallelLinear, Region, RowParallelLinear
from workers.parallel.vocabulary import VocabularyParallelCrossEntropy, VocabularyParallelEmbedding
from workers.workload.model import MLP, VOCABULARY, Attention, Embedding, Head, Model

# Parts that a mistake replaces: a rank's own q, k and v, and what sums over slices.
QKV: TypeAlias = Callable[[Attention, tuple[int, ...], int], dict[str, nn.Module]]
Row: TypeAlias = type[RowParallelLinear]


def own_heads(attention: Attention, heads: tuple[int, ...], rank: int) -> dict[str, nn.Module]:
    """A rank's heads of q, of k and of v: the same ones of each."""
    dense = {"q": attention.q, "k": attention.k, "v": attention.v}
    return {name: ColumnParallelLinear(project, heads, rank) for name, project in dense.items()}


def slice_layers(
    model: Model, group: dist.ProcessGroup, region: Region, qkv: QKV = own_heads, row: Row = RowParallelLinear
) -> None:
    """Replace the layers of a dense `model` by this rank's slices of them, in place; parameters keep their names.

    Attention: enter, once for all three -> q, k, v by rows, whole heads; o by columns, the same heads -> leave.
    MLP:       enter -> up by rows; down by columns -> leave.
    """
    rank, ranks = group.rank(), group.size()
    for part in list(model.modules()):
        if isinstance(part, Attention):
            heads = shares(part.q.out_features // part.head_dim, ranks, part.head_dim)
            for name, project in qkv(part, heads, rank).items():
                part.register_module(name, project)
            part.register_module("o", row(part.o, heads, rank, region))
            enter_before(part, region)
        elif isinstance(part, MLP):
            sizes = shares(part.up.out_features, ranks)
            part.register_module("up", ColumnParallelLinear(part.up, sizes, rank))
            part.register_module("down", row(part.down, sizes, rank, region))
            enter_before(part, region)
    if model.name == "gpt":
        slice_ends(model, group, region)


def slice_ends(model: Model, group: dist.ProcessGroup, region: Region) -> None:
    """gpt's two ends, by rows of the vocabulary; tied weights stay tied, since both are sliced by the same ones.

    Embedding:    token -> leave; position whole.
    Head:         norm whole; enter -> project.
    CrossEntropy: over the ranks' scores, which are never gathered.
    """
    rank, sizes = group.rank(), shares(VOCABULARY, group.size())
    first, last = model.layers[0], model.layers[-1]
    assert isinstance(first, Embedding)
    assert isinstance(last, Head)
    tied = last.project.weight is first.token.weight
    token = VocabularyParallelEmbedding(first.token, sizes, rank, region)
    project = ColumnParallelLinear(last.project, sizes, rank)
    if tied:
        project.weight = token.weight
    first.register_module("token", token)
    last.register_module("project", project)
    enter_before(project, region)
    model.loss = VocabularyParallelCrossEntropy(sizes, group)


def enter_before(module: nn.Module, region: Region) -> None:
    """What `module` is given comes through `region.enter` first: a hook, so that no parameter gets another name."""
    module.register_forward_pre_hook(partial(_entered, region))


def _entered(region: Region, _: nn.Module, args: tuple[Any, ...]) -> Tensor:
    return region.enter(args[0])
