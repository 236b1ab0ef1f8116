"""The classic mistakes of tensor parallelism, made by LAB_BUG: at a slice's ends, in its heads and in its bias."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workers.config import Config
from workers.contract import Instead, Mistake, Needs
from workers.parallel import differentiable
from workers.parallel.tensor import ColumnParallelLinear, RowParallelLinear, Whole
from workers.workload.model import Attention


class DoubleReduce(Whole):
    """Takes g for a sum of which every rank has a loss of its own."""

    def leave(self, partial: Tensor) -> Tensor:
        return differentiable.all_reduce(partial, self.group, loss="own")


class LostF(Whole):
    """Forgets that its input was used on all ranks."""

    def enter(self, x: Tensor) -> Tensor:
        return x


class BiasEverywhere(RowParallelLinear):
    """Adds the bias to its part of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.region.leave(F.linear(x, self.weight, self.bias))


@torch.no_grad()
def packed(attention: Attention, heads: tuple[int, ...], rank: int) -> dict[str, nn.Module]:
    """A rank's q, k and v as one run of the rows of [Q; K; V], cut in three."""
    dense = {"q": attention.q, "k": attention.k, "v": attention.v}
    for name in ("weight", "bias"):
        rows = torch.cat([getattr(project, name) for project in dense.values()])
        runs = rows.split([3 * num_rows for num_rows in heads])
        for index, project in enumerate(dense.values()):
            getattr(project, name).copy_(torch.cat([run.chunk(3)[index] for run in runs]))
    return {name: ColumnParallelLinear(project, heads, rank) for name, project in dense.items()}


def without_attention(config: Config) -> str:
    """Where no heads are, none can be another's."""
    return "" if config.model == "gpt" else f"LAB_MODEL={config.model}: it has no attention of the lab's"


MISTAKES = {
    "double_reduce": Mistake(
        "the backward of g is an all_reduce as well: of a gradient that every rank has whole, N times too large",
        "gradients",
        Instead(("megatron",), {"region": DoubleReduce}),
    ),
    "lost_f": Mistake(
        "a slice takes its input without f: the gradient that reaches what lies before is this rank's part alone",
        "replicas",
        Instead(("naive", "megatron"), {"region": LostF}),
    ),
    "packed_qkv": Mistake(
        "each rank takes one run of the rows of [Q; K; V] and cuts it in three: its q, k and v are of other heads",
        "losses",
        Instead(("megatron", "sequence"), {"qkv": packed}),
        Needs(unless=without_attention),
    ),
    "bias_everywhere": Mistake(
        "a row-parallel layer adds its bias on every rank before the sum, where it counts N times",
        "losses",
        Instead(("megatron", "sequence"), {"row": BiasEverywhere}),
    ),
}
