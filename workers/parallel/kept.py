"""Kept: tensors that a mechanism keeps for a backward pass, the way autograd keeps what operations save.

Who counts activations sees what operations save, and layers that compute themselves again compute nothing else again.
What a mechanism put into an attribute of its own would be neither counted nor let go.
"""

from typing import Any

import torch
from torch import Tensor

ANCHOR = torch.empty(0, requires_grad=True)  # what makes autograd note the operation; nothing is run back to it


class Keep(torch.autograd.Function):
    """Saves its tensors, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """An empty tensor, whose graph node keeps `tensors`."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


def kept(*tensors: Tensor) -> Any:
    """A graph node whose `saved_tensors` are `tensors`; gradients must be enabled."""
    return Keep.apply(ANCHOR, *tensors).grad_fn  # type: ignore[no-untyped-call]
