"""Layers of any model replaced by a rank's part of them, with f before and g after, and by DTensor's.

f stands before a tensor and not before a layer: whatever number of layers takes the same one, as q, k and v do, it is
entered once, and its gradient is summed once. DTensor enters it for each.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from workers.parallel.tensor import ColumnParallelLinear, Region, RowParallelLinear
from workers.parallel.vocabulary import VocabularyParallelEmbedding


class Cut(NamedTuple):
    """How one layer is cut."""

    by_outputs: bool
    sizes: tuple[int, ...]  # features of each rank, or an embedding's rows
    embeds: bool = False


class Alone:
    """A region of one rank that sends nothing: to see whether its parts fit each other."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, partial: Tensor) -> Tensor:
        return partial


class Entered:
    """What a layer takes comes through f, once for all layers in a row that take the same tensor."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        (x,) = args
        if self.last is None or self.last[0] is not x:
            self.last = (x, self.region.enter(x))
        return self.last[1]

    def forget(self, *_: Any) -> None:
        """The pass is over: hold no activation of it."""
        self.last = None


def cut(
    model: nn.Module,
    cuts: dict[str, Cut],
    rank: int,
    region: Region,
    row: type[RowParallelLinear] = RowParallelLinear,
) -> None:
    """Replace the named layers of a dense `model` by this rank's parts of them, in place; parameters keep their
    names."""
    entered = Entered(region)
    for name, each in cuts.items():
        dense = model.get_submodule(name)
        if isinstance(dense, nn.Embedding):
            part: nn.Module = VocabularyParallelEmbedding(dense, each.sizes, rank, region)
            model.set_submodule(name, part)
            continue
        assert isinstance(dense, nn.Linear)
        if each.by_outputs:
            part = ColumnParallelLinear(dense, each.sizes, rank)
            part.register_forward_pre_hook(entered)
        else:
            part = row(dense, each.sizes, rank, region)
        model.set_submodule(name, part)
    model.register_forward_hook(entered.forget)


def styles(cuts: dict[str, Cut]) -> dict[str, Any]:
    """The same as DTensor's plan."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    def style(each: Cut) -> Any:
        if each.embeds:
            return RowwiseParallel(input_layouts=Replicate())
        return ColwiseParallel() if each.by_outputs else RowwiseParallel()

    return {name: style(each) for name, each in cuts.items()}
