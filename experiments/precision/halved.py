"""A replica that computes in 16 bits: what every such variant shares, and the few things in which they differ."""

from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.config import Config
from workers.parallel.buckets import GradientBuckets
from workers.parallel.masters import Masters
from workers.parallel.rounding import stochastic_bf16
from workers.parallel.scaling import LossScale, all_finite
from workers.strategies.replica import Replica, begin_alike
from workers.workload.model import Model
from workers.workload.optimizer import make_optimizer


class Cast(nn.Module):
    """The model, whose inputs come in float32 where they are no tokens."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = self.model(inputs.to(self.dtype) if inputs.is_floating_point() else inputs, targets)
        return total


class Halved(Replica):
    """A Strategy: weights and gradients in `dtype`, gradients summed over the ranks as they are.

    Args:
        scaled: whether the loss is scaled.
        stepped: what the optimizer steps: the weights themselves, float32 copies that go after each update, or float32 masters
            that stay.
        stochastic: whether copies are rounded back at random; all ranks draw the same numbers, or replicas would part.
    """

    def __init__(
        self, model: Model, group: dist.ProcessGroup, config: Config, dtype: torch.dtype, *, scaled: bool = False,
        stepped: Literal["weights", "copies", "masters"] = "weights", stochastic: bool = False,
    ) -> None:  # fmt: skip
        begin_alike(model, group, config)
        exact = [parameter.detach().float().clone() for parameter in model.parameters()] if stepped != "weights" else []
        model.to(dtype)
        self.dtype = dtype
        super().__init__(
            model,
            config,
            GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20),
            forward=Cast(model, dtype),
        )
        self.loss_scale = LossScale() if scaled else None
        self.scale = self.loss_scale.value if self.loss_scale else 1.0
        self.masters: Masters | None = None
        self.stepped = list(model.parameters())
        if stepped != "weights":
            device = self.stepped[0].device
            drawn = partial(stochastic_bf16, generator=torch.Generator(device).manual_seed(config.seed))
            rounded = drawn if stochastic else None
            self.masters = Masters(self.stepped, exact, kept=stepped == "masters", rounded=rounded)
            self.stepped = self.masters.parameters
            self.optimizer = make_optimizer(self.stepped, config)

    @property
    def remembered(self) -> list[nn.Parameter]:
        """The weights from which the next update starts: masters that are kept, or the 16-bit ones."""
        return self.masters.parameters if self.masters and self.masters.kept else list(self.model.parameters())

    def update(self) -> None:
        """Take the step if its gradients are numbers, where the loss is scaled; then mind the scale."""
        if taken := self.ready():
            self.take()
        if self.loss_scale is not None:
            self.loss_scale.adjust(overflowed=not taken)
            self.scale = self.loss_scale.value

    def ready(self) -> bool:
        """Unscale, then clip: the bound is meant for the true gradients. False if the scaled ones have left fp16's range."""
        summed = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if self.loss_scale is not None and not all_finite(summed):
            return False
        if self.config.bug == "unscaled_clip" and self.loss_scale is not None:
            self._clip(list(self.model.parameters()))
        if self.masters is not None:
            self.masters.deliver(self.scale)
        if self.config.bug != "unscaled_clip" or self.loss_scale is None:
            self._clip(self.stepped)
        return True

    def take(self) -> None:
        """The optimizer's step, and the weights from it."""
        self.optimizer.step()
        if self.masters is not None:
            self.masters.refresh()

    def _clip(self, parameters: list[nn.Parameter]) -> None:
        """By the global norm, which every replica has: gradients are summed already."""
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.config.clip)
