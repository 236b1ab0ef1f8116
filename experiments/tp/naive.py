"""The lesson's own tensor parallelism: every linear layer by itself, its outputs split and gathered again at once.

It needs nothing but the layer, and so it is what one writes first. `dist.all_gather` records nothing for autograd (W8): here
the gather has a backward, the slice of this rank, since behind it all ranks compute the same loss; and the gradient of the
input, of which every rank's outputs give a part, is summed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from workers.parallel import differentiable
from workers.parallel.cut import shares
from workers.parallel.phases import phase
from workers.parallel.tensor import ColumnParallelLinear, Seams


class GatheredLinear(ColumnParallelLinear):
    """A linear layer of which each rank computes some outputs, and has all of them: [..., D] to [..., D_out]."""

    def __init__(self, dense: nn.Linear, group: dist.ProcessGroup, seams: Seams) -> None:
        super().__init__(dense, shares(dense.out_features, group.size()), group.rank())
        self.group, self.seams = group, seams

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.cuts["weight"].sizes
        mine = super().forward(self.seams.enter(x))
        padded = F.pad(mine, (0, max(sizes) - mine.shape[-1]))  # gloo gathers tensors of one size alone
        with phase("all_gather"):
            rows = differentiable.all_gather(padded, self.group, loss="replicated")  # [N, ..., ceil(D_out/N)]
        return torch.cat([row[..., :size] for row, size in zip(rows, sizes, strict=True)], -1)


def split_every_linear(model: nn.Module, group: dist.ProcessGroup, seams: Seams) -> None:
    """Replace the linear layers of a dense `model`, in place."""
    for name, linear in split_linears(model).items():
        model.set_submodule(name, GatheredLinear(linear, group, seams))


def split_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers by name, but one whose weight is the embedding's, since that is whole here."""
    names = {name for name, _ in model.named_parameters()}  # a tied weight has its first name alone
    modules = dict(model.named_modules())
    return {
        name: module for name, module in modules.items() if isinstance(module, nn.Linear) and f"{name}.weight" in names
    }
