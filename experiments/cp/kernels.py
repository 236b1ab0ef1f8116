"""What a rank computes of attention, seen where PyTorch's kernel is called, forward and backward.

Shapes and mask are those that the call was given, so no number comes from the mechanism that is judged by them.
Receives are noted between the kernels: whether keys travel while others are computed with, the order tells alone.
"""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
RECEIVE, COMPUTE = "receive", "compute"


class Kernels(TorchDispatchMode):
    """Around a step: the `pairs` of all samples and heads, `cpu_s` and `order` of what is called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs, self.cpu_s = 0, 0.0
        self.order: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for this class."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name  # type: ignore[attr-defined]
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if name in (FORWARD, BACKWARD):
            self.cpu_s += time.thread_time() - began
            q, k = args[:2] if name == FORWARD else args[1:3]
            causal = args[4:5] if name == FORWARD else args[7:8]  # left out where it is False
            self.pairs += pairs(q, k, causal=any(causal))
            self.order.append(COMPUTE)
        elif name == "c10d::recv_":
            self.order.append(RECEIVE)
        return result


def pairs(q: Tensor, k: Tensor, *, causal: bool) -> int:
    """(row, key) pairs of all samples and heads in [B, heads, rows, head_dim]; of a triangle those below it."""
    rows, keys = q.shape[2], k.shape[2]
    return q.shape[0] * q.shape[1] * (rows * (rows + 1) // 2 if causal else rows * keys)
