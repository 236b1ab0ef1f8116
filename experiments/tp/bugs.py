"""The classic mistakes of tensor parallelism, made by LAB_BUG: at a slice's ends, in its heads and in its bias."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.collectives import autograd
from distlab.config import Config
from distlab.contract import Mistakes, Needs
from distlab.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, Whole
from distlab.workload.model import Attention

mistake = Mistakes()


# --- the settings that hide one ---


def without_attention(config: Config) -> str:
    """Where no heads are, none can be another's."""
    return "" if config.model == "gpt" else f"LAB_MODEL={config.model}: it has no attention of the lab's"


# --- the mistakes ---


@mistake("double_reduce", check="gradients", part="region", of=("megatron",))
class DoubleReduce(Whole):
    """The backward of g is an all_reduce as well: of a gradient that every rank has whole, N times too large."""

    def leave(self, partial: Tensor) -> Tensor:
        return autograd.all_reduce(partial, self.group, loss="own")


@mistake("lost_f", check="replicas", part="region", of=("naive", "megatron"))
class LostF(Whole):
    """A slice takes its input without f: the gradient that reaches what lies before is this rank's part alone."""

    def enter(self, x: Tensor) -> Tensor:
        return x


@mistake("packed_qkv", check="losses", part="qkv", of=("megatron", "sequence"), needs=Needs(unless=without_attention))
@torch.no_grad()
def packed(attention: Attention, heads: tuple[int, ...], rank: int) -> dict[str, nn.Module]:
    """Each rank takes one run of the rows of [Q; K; V] and cuts it in three: its q, k and v are of other heads."""
    dense = {"q": attention.q, "k": attention.k, "v": attention.v}
    for name in ("weight", "bias"):
        rows = torch.cat([getattr(project, name) for project in dense.values()])
        runs = rows.split([3 * num_rows for num_rows in heads])
        for index, project in enumerate(dense.values()):
            getattr(project, name).copy_(torch.cat([run.chunk(3)[index] for run in runs]))
    return {name: ColumnParallelLinear(project, heads, rank) for name, project in dense.items()}


@mistake("bias_everywhere", check="losses", part="row", of=("megatron", "sequence"))
class BiasEverywhere(RowParallelLinear):
    """A row-parallel layer adds its bias on every rank before the sum, where it counts N times."""

    def forward(self, x: Tensor) -> Tensor:
        return self.region.leave(F.linear(x, self.weight, self.bias))
