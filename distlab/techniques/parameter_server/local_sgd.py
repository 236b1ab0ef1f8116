"""Local steps and an outer step: workers train independently, and their weights are averaged now and then.

Each worker takes H local steps from common weights w. The mean of their weight changes, weighted by the samples that
each has processed, is then used as a gradient:

    d = sum_k f_k (w - w_k)     f_k: worker k's fraction of the samples, sum_k f_k = 1
    v = m·v + d                 momentum
    w = w - lr·(d + m·v)        Nesterov's form, as torch.optim.SGD has it

With lr = 1 and m = 0 the weights are simply averaged: local SGD (Stich 2019, "Local SGD Converges Fast and Communicates
Little"). With momentum it is DiLoCo's outer optimizer (Douillard et al. 2023, "DiLoCo", algorithm 1). With H = 1, plain
SGD and no momentum, d is lr times the gradient of the mean over the whole batch: data parallelism. It sends one
all_reduce every H steps.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class OuterStep:
    """An outer step of all ranks of `group` after every `local_steps` calls of `step`.

    Args:
        weights: [P] flat, trained by this worker; equal on all ranks now and after each outer step.
        group: the workers.
        local_steps: H.
        lr, momentum: of the outer step.
    """

    def __init__(
        self, weights: Tensor, group: dist.ProcessGroup, local_steps: int, *, lr: float = 1.0, momentum: float = 0.0
    ) -> None:
        self.weights, self.group = weights, group
        self.local_steps, self.lr, self.momentum = local_steps, lr, momentum
        self.common = weights.clone()
        self.velocity = torch.zeros_like(weights) if momentum else None
        self.done = 0  # local steps since the last outer one
        self._fraction = 0.0

    def step(self, fraction: float) -> None:
        """Count a local step on this worker's `fraction` of the global batch; those of all ranks add up to one."""
        self._fraction += fraction
        self.done += 1
        if self.done < self.local_steps:
            return
        moved = torch.sub(self.common, self.weights).mul_(self._fraction / self.done)
        self.average(moved)
        if self.velocity is not None:
            moved = self.outer_direction(moved)
        self.common.add_(moved, alpha=-self.lr)
        self.weights.copy_(self.common)
        self.done, self._fraction = 0, 0.0

    def average(self, moved: Tensor) -> None:
        """Sum the weighted changes of all workers, in place."""
        dist.all_reduce(moved, group=self.group)

    def outer_direction(self, moved: Tensor) -> Tensor:
        """Return the direction of the outer step: `moved` plus Nesterov's look-ahead along the momentum."""
        assert self.velocity is not None
        return moved.add_(self.velocity.mul_(self.momentum).add_(moved), alpha=self.momentum)
