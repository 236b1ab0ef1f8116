"""Learning rates a layer: what LARS and LAMB share.

A large batch takes few steps, so each has to be long, and one rate for all layers is bounded by the layer whose weights
are small beside their gradients. A layer-wise optimizer scales each weight's update by a ratio of two norms, so that
every layer moves by about the same share of its own size (You et al. 2017, section 4).

Biases and the gains of norms are left out, of the ratio and of weight decay: a bias begins at zero, where a share of
its size is no step at all. A norm is that of the whole weight. Where ranks hold parts of it, the squares of all parts
are summed over them, in one call for all norms of a step; a part's own norm would give every rank another ratio, and
turn the update.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dict[
    str, Any
]  # of parameters: {"params": [...], "lr": ..., "weight_decay": ..., "adapted": whether a ratio scales it}


def decayed_apart(parameters: Iterable[Tensor], weight_decay: float) -> list[Group]:
    """Two groups: matrices, which are scaled and decayed, and vectors (biases, gains), which are neither."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay, "adapted": True},
        {"params": vectors, "weight_decay": 0.0, "adapted": False},
    ]


class Layerwise:
    """An optimizer of parameter groups, as torch's are; a subclass says what a group's update is.

    Args: groups: as `decayed_apart` makes them. Where weights are sharded, every rank lists the same ones, its parts of
        them. lr: the rate of all groups that have none of their own. sharded_over: the ranks that hold parts of the
        weights; None where each holds them whole.
    """

    def __init__(self, groups: list[Group], lr: float, sharded_over: dist.ProcessGroup | None = None) -> None:
        self.param_groups: list[Group] = [{"lr": lr} | group for group in groups]
        self.sharded_over = sharded_over
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self.update(trained, group)

    def update(self, parameters: list[Tensor], group: Group) -> None:
        """Step `parameters` of one group by their gradients."""
        raise NotImplementedError

    def norms(self, *lists: list[Tensor]) -> list[Tensor]:
        """The norm of each tensor, a vector a list, in a single all_reduce; they stay on the device, so that no step
        waits for it."""
        tensors = [tensor for one in lists for tensor in one]
        norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])
        if self.sharded_over is not None:
            squares = norms.square()
            dist.all_reduce(squares, group=self.sharded_over)
            norms = squares.sqrt()
        return list(norms.split([len(one) for one in lists]))
