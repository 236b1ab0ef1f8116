"""The classic mistakes of tensor parallelism, made on purpose by LAB_BUG, each with the check that has to see it.

A mistake that cannot show in the run that was asked for is refused: a check that cannot fail would only look like one that
held.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.config import Config
from workers.lab import Bug
from workers.parallel import differentiable
from workers.parallel.cut import shares
from workers.parallel.tensor import RowParallelLinear, Whole
from workers.workload.model import Attention, Model

BUGS = {
    "double_reduce": Bug(
        "the backward of g is an all_reduce as well: of a gradient that every rank has whole, N times too large",
        "gradients",
    ),
    "lost_f": Bug(
        "a slice takes its input without f: the gradient that reaches what lies before is this rank's part alone",
        "replicas",
    ),
    "packed_qkv": Bug(
        "each rank takes one run of the rows of [Q; K; V] and cuts it in three: its q, k and v are of other heads",
        "losses",
    ),
    "bias_everywhere": Bug(
        "a row-parallel layer adds its bias on every rank before the sum, where it counts N times", "losses"
    ),
}

SEEN_IN = {  # the variants that can make the mistake
    "double_reduce": ("megatron",),
    "lost_f": ("naive", "megatron"),
    "packed_qkv": ("megatron", "sequence"),
    "bias_everywhere": ("megatron", "sequence"),
}


class DoubleReduce(Whole):
    """Takes g for a sum of which every rank has a loss of its own (W22)."""

    def leave(self, partial: Tensor) -> Tensor:
        return differentiable.all_reduce(partial, self.group, loss="own")


class LostF(Whole):
    """Forgets that its input was used on all ranks."""

    def enter(self, x: Tensor) -> Tensor:
        return x


class BiasEverywhere(RowParallelLinear):
    """Adds the bias to its part of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.seams.leave(F.linear(x, self.weight, self.bias))


def whole_of(config: Config) -> type[Whole]:
    """The f and g that LAB_BUG asks for."""
    return {"double_reduce": DoubleReduce, "lost_f": LostF}.get(config.bug or "", Whole)


def row_of(config: Config) -> type[RowParallelLinear]:
    """The row-parallel layer that LAB_BUG asks for."""
    return BiasEverywhere if config.bug == "bias_everywhere" else RowParallelLinear


@torch.no_grad()
def pack_qkv(model: Model, num_ranks: int) -> None:
    """Move the rows of q, k and v to where a rank's run of [Q; K; V], cut in three, would take them from (W9)."""
    for attention in [part for part in model.modules() if isinstance(part, Attention)]:
        rows = shares(attention.q.out_features // attention.head_dim, num_ranks, attention.head_dim)
        for name in ("weight", "bias"):
            dense = [getattr(project, name) for project in (attention.q, attention.k, attention.v)]
            runs = torch.cat(dense).split([3 * num_rows for num_rows in rows])
            for index, parameter in enumerate(dense):
                parameter.copy_(torch.cat([run.chunk(3)[index] for run in runs]))


def invisible(config: Config) -> list[str]:
    """A sentence if no check could see LAB_BUG with these settings."""
    bug = config.bug
    if bug is None or bug not in BUGS:
        return []
    makers = SEEN_IN[bug]
    reasons = [
        (not config.proof, "LAB_PROOF=0: nothing is compared"),
        (config.world_size == 1, "WORLD_SIZE=1: it takes two ranks"),
        (bug == "packed_qkv" and config.model == "mlp", "LAB_MODEL=mlp: it has no attention"),
        (
            bool(config.variant) and not set(config.variant) & set(makers),
            f"these variants: it takes {' or '.join(makers)}",
        ),
    ]
    return [f"LAB_BUG={bug} cannot show with {reason}" for applies, reason in reasons if applies][:1]
