"""The step of every tensor-parallel variant: each rank has a part of the model, its optimizer, and all samples.

Variants differ in how they slice the model. The gradient of a slice is complete on the rank that holds it. The gradient
of a parameter that every rank holds whole is complete on every rank, since the ranks compute the same. With sequence
parallelism such a parameter works on one rank's rows only: then the ranks' gradients are summed, once per step
(Korthikanti et al. 2022, section 4.2.2, does not mention it).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import MLP, VOCABULARY, Attention, Embedding, Head, Model
from distlab.lab.workload.optimizer import PartitionedStrategy, forward_backward, local
from distlab.techniques.collectives.sharded_tensor import LocalShard, whole_piece
from distlab.techniques.tensor_parallel.layers import (
    ColumnParallelLinear,
    Region,
    RowParallelLinear,
    Slice,
    VocabularyParallelCrossEntropy,
    VocabularyParallelEmbedding,
    partition_sizes,
    slices_of,
    sum_together,
)


class TensorParallel(PartitionedStrategy):
    """A Strategy over `model`, this rank's part of it.

    Args:
        slices: the slice of each parameter that is held in part, by name; by default from the model's layers.
        by_rows: parameters that are held whole work on this rank's rows only, so their gradients are summed.
        loss_is_local: the loss covers this rank's rows only, and the ranks' losses add up to the total. Otherwise all
            ranks compute the same loss, and rank 0 returns it.
    """

    def __init__(
        self, model: Model, group: dist.ProcessGroup, config: Config, slices: dict[str, Slice] | None = None, *,
        sequence_parallel: bool = False, loss_is_local: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dict(model.named_parameters()), dict(enumerate(model.layers)), group, config)
        self.model, self.sequence_parallel = model, sequence_parallel
        self.returns_loss = loss_is_local or group.rank() == 0
        self.slices = slices_of(model) if slices is None else slices

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Run forward and backward of all microbatches; the layers do all communication except the last sum."""
        self.model.zero_grad()
        losses = [
            local(forward_backward(self.model, microbatch, number)) for number, microbatch in enumerate(microbatches)
        ]
        if self.sequence_parallel:
            self.sum_gradients()
        return torch.stack(losses).sum() if self.returns_loss else None

    def sum_gradients(self) -> None:
        """Sum the gradients of all parameters that every rank holds whole, in one call."""
        for _, parameter in self.replicated():
            if parameter.grad is None:  # all ranks sum tensors of one size
                parameter.grad = torch.zeros_like(parameter)
        sum_together([p.grad for _, p in self.replicated() if p.grad is not None], self.group)

    def replicated(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that every rank holds whole; they must be equal on all ranks."""
        return [(name, p) for name, p in self.named.items() if name not in self.slices]

    def counts(self, name: str, tensor: Tensor) -> bool:
        """Count a slice on each rank; everything else, and AdamW's number of steps, on rank 0."""
        return (name in self.slices and tensor.dim() > 0) or self.group.rank() == 0

    def piece(self, name: str, tensor: Tensor) -> LocalShard:
        """Return this rank's slice with its place in the dense tensor."""
        if name in self.slices and tensor.dim():
            return self.slices[name].place(local(tensor), self.group.rank())
        return whole_piece(local(tensor))

    def is_replicated(self, name: str) -> bool:
        """Whether every rank holds the whole parameter; of a DTensor, whether it is replicated."""
        placements = getattr(self.named[name], "placements", ())
        return name not in self.slices and all(each.is_replicate() for each in placements)


# The lab's model, sliced: layers.py's layers take the places of the model's own, and a `Region` says what lies between.


def sliced_linears(model: nn.Module) -> list[tuple[str, Attention | MLP, list[str], str, int]]:
    """List the blocks that are sliced: name, block, its layers cut by rows, its layer cut by columns, and the unit that
    stays whole, a hidden unit of the MLP or the rows of an attention head."""
    blocks = [(name, part) for name, part in model.named_modules() if isinstance(part, Attention | MLP)]
    return [
        (name, part, ["q", "k", "v"], "o", part.head_dim)
        if isinstance(part, Attention)
        else (name, part, ["up"], "down", 1)
        for name, part in blocks
    ]


def slice_layers(model: Model, group: dist.ProcessGroup, region: Region) -> None:
    """Replace the layers of a dense `model` by this rank's slices of them, in place; parameters keep their names.

    Attention: enter, once for all three -> q, k, v by rows, whole heads; o by columns, the same heads -> leave.
    MLP:       enter -> up by rows; down by columns -> leave.
    """
    for _, part, columns, row, unit in sliced_linears(model):
        dense = part.get_submodule(row)
        assert isinstance(dense, nn.Linear)
        sizes = partition_sizes(dense.in_features // unit, group.size(), unit)
        for name in columns:
            part.register_module(name, ColumnParallelLinear(getattr(part, name), sizes, group.rank()))
        part.register_module(row, RowParallelLinear(dense, sizes, group.rank(), region))
        enter_before(part, region)
    if model.name == "gpt":
        slice_ends(model, group, region)


def slice_by_lesson(model: Model, group: dist.ProcessGroup, slice_block: Callable[..., None]) -> dict[str, Slice]:
    """Slice the layers by the function of a lesson.py, which leaves gpt's two ends whole; return the slices by name."""
    slices: dict[str, Slice] = {}
    for name, part, columns, row, unit in sliced_linears(model):
        sizes = partition_sizes(getattr(part, row).in_features // unit, group.size(), unit)
        slice_block(part, columns, row, group, unit)
        slices |= {f"{name}.{each}.{kind}": Slice(0, sizes) for each in columns for kind in ("weight", "bias")}
        slices[f"{name}.{row}.weight"] = Slice(1, sizes)
    return slices


def slice_ends(model: Model, group: dist.ProcessGroup, region: Region) -> None:
    """Slice gpt's two ends by rows of the vocabulary, both by the same rows, so that tied weights stay tied.

    Embedding:    token -> leave; position whole.
    Head:         norm whole; enter -> project.
    CrossEntropy: over the ranks' scores, which are never gathered.
    """
    rank, sizes = group.rank(), partition_sizes(VOCABULARY, group.size())
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
    """Apply `region.enter` to the input of `module`, by a hook: a wrapper would rename its parameters."""
    module.register_forward_pre_hook(partial(_entered, region))


def _entered(region: Region, _: nn.Module, args: tuple[Any, ...]) -> Tensor:
    return region.enter(args[0])


# PyTorch's own, for the lab's layers.


def plan(model: nn.Module) -> dict[str, Any]:
    """Return the plan of `parallelize_module`: the style of each linear layer and embedding, by name."""
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
    """Let gpt's two ends share one weight again: `parallelize_module` has given each its own."""
    model.layers[-1].get_submodule("project").register_parameter("weight", model.get_parameter("layers.0.token.weight"))
