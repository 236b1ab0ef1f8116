"""What every tensor-parallel variant shares: a part of the model and an optimizer on each rank, all samples on every.

Variants differ in how the model was split. What a rank holds a part of has its whole gradient there. What every rank
holds whole has it on every rank too, since the gradient that reaches it is the same everywhere; unless it worked on a
part of the rows alone, then the ranks' gradients are summed, once a step (Korthikanti et al. 2022, section 4.2.2,
leaves that unsaid).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import MLP, VOCABULARY, Attention, Embedding, Head, Model
from distlab.lab.workload.optimizer import HoldsParts, forward_backward, local
from distlab.techniques.collectives.sharded_tensor import LocalShard, whole_piece
from distlab.techniques.tensor_parallel.layers import (
    ColumnParallelLinear,
    Region,
    RowParallelLinear,
    Slice,
    VocabularyParallelCrossEntropy,
    VocabularyParallelEmbedding,
    shares,
    slices_of,
    sum_together,
)


class TensorParallel(HoldsParts):
    """A Strategy over `model`, this rank's part of it.

    Args:
        slices: which parameters are held in part, by name; by default what the model's layers say.
        by_rows: what is whole works on this rank's rows only, so its gradients are summed.
        own_loss: so does the loss, and each rank returns its share; else all have the same one, and rank 0 returns it.
    """

    def __init__(
        self, model: Model, group: dist.ProcessGroup, config: Config, slices: dict[str, Slice] | None = None, *,
        by_rows: bool = False, own_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dict(model.named_parameters()), dict(enumerate(model.layers)), group, config)
        self.model, self.by_rows = model, by_rows
        self.has_share = own_loss or group.rank() == 0
        self.slices = slices_of(model) if slices is None else slices

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Forward and backward of all microbatches; whatever is sent, but the last sum, is sent inside of them."""
        self.model.zero_grad()
        shares = [
            local(forward_backward(self.model, microbatch, number)) for number, microbatch in enumerate(microbatches)
        ]
        if self.by_rows:
            self.sum_gradients()
        return torch.stack(shares).sum() if self.has_share else None

    def sum_gradients(self) -> None:
        """Sum the gradients of what every rank holds whole, in one call."""
        for _, parameter in self.whole():
            if parameter.grad is None:  # the same call on all ranks
                parameter.grad = torch.zeros_like(parameter)
        sum_together([p.grad for _, p in self.whole() if p.grad is not None], self.group)

    def whole(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that every rank holds whole, and must hold the same."""
        return [(name, p) for name, p in self.named.items() if name not in self.slices]

    def counts(self, name: str, tensor: Tensor) -> bool:
        """Of a slice each rank's part, AdamW's number of steps once; all else on rank 0."""
        return (name in self.slices and tensor.dim() > 0) or self.group.rank() == 0

    def piece(self, name: str, tensor: Tensor) -> LocalShard:
        """The place of this rank's slice."""
        if name in self.slices and tensor.dim():
            return self.slices[name].place(local(tensor), self.group.rank())
        return whole_piece(local(tensor))

    def is_alike(self, name: str) -> bool:
        """What every rank holds whole; of DTensors those that are replicated."""
        placements = getattr(self.named[name], "placements", ())
        return name not in self.slices and all(each.is_replicate() for each in placements)


# The lab's layers, sliced by tensor parallelism: a dense model, and in its place what one rank computes of it.
#
# The two linear layers of a slice and the two ends of gpt (layers.py) take the places of the model's own. What lies
# between two slices is the caller's: everything on every rank, or a part of the rows.

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


def slice_by_lesson(model: Model, group: dist.ProcessGroup, slice_one: Callable[..., None]) -> dict[str, Slice]:
    """The same by the function of a lesson.py, which leaves gpt's two ends whole; says which parameters are slices."""
    slices: dict[str, Slice] = {}
    for name, part in model.named_modules():
        if isinstance(part, Attention | MLP):
            columns, row, unit = ["up"], "down", 1
            if isinstance(part, Attention):
                columns, row, unit = ["q", "k", "v"], "o", part.head_dim
            sizes = shares(getattr(part, row).in_features // unit, group.size(), unit)
            slice_one(part, columns, row, group, unit)
            slices |= {f"{name}.{each}.{kind}": Slice(0, sizes) for each in columns for kind in ("weight", "bias")}
            slices[f"{name}.{row}.weight"] = Slice(1, sizes)
    return slices


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


# PyTorch's plan for the lab's layers: what `parallelize_module` makes DTensors of, and what has to be tied again.


def plan(model: nn.Module) -> dict[str, Any]:
    """How each linear layer and embedding is parallelised, by its name."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel(),
        "project": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }  # fmt: skip
    names = [name for name, _ in model.named_modules()]
    return {name: styles[name.rpartition(".")[2]] for name in names if name.rpartition(".")[2] in styles}


def tie(model: Model) -> None:
    """Let gpt's ends share the weight again that each was given one of."""
    model.layers[-1].get_submodule("project").register_parameter("weight", model.get_parameter("layers.0.token.weight"))
