"""Kept: tensors that a mechanism keeps for a backward pass, the way autograd keeps what operations save.

Who counts activations sees what operations save, and layers that compute themselves again compute nothing else again.
What a mechanism put into an attribute of its own would be neither counted nor let go.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

ANCHOR = torch.empty(0, requires_grad=True)  # what makes autograd note the operation; nothing is run back to it


class SaveForBackward(torch.autograd.Function):
    """Saves its tensors, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """An empty tensor, whose graph node keeps `tensors`."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


def save_for_backward(*tensors: Tensor) -> Any:
    """A graph node whose `saved_tensors` are `tensors`; gradients must be enabled."""
    return SaveForBackward.apply(ANCHOR, *tensors).grad_fn  # type: ignore[no-untyped-call]


# Autograd's engine without the checks of its front door.
#
# `torch.autograd.backward` looks at shapes and types of all it is given before it starts the engine. Behind a sleep
# of 10 ms, as in a pipeline that waits, the weights and biases of two linear layers take 0.18 ms through it and 0.12
# without (awake 0.035 and 0.017; medians of 60 calls on one core), and nobody can go on meanwhile. What a mechanism
# hands over it has just computed, so the shapes are right.


def fast_backward(outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Add to the leaves of `outputs` their gradients, given one of each output, of its shape; hooks are called."""
    Variable._execution_engine.run_backward(  # FSDP and DDP of torch take the engine here too
        outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )
