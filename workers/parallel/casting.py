"""16 bits on the wire: half of float32's bytes, whatever the number of ranks.

bf16 has float32's range and 8 bits of precision; fp16 has 11 bits, and ends at 65504. A sum must not leave that range
on any hop, so each rank sends at most 1/(N+1) of the largest number (an N-th each could still be rounded up to
infinity): what is above stays in the residual, where there is one. Sums are added in 16 bits too, hop by hop, and that
rounding is nobody's residual: it is why this is exact up to (N-1) roundings and not to the bit.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.compression import OneMessage


class Cast(OneMessage):
    """Sums in `wire_dtype` (torch.bfloat16 or torch.float16) whatever the bucket is in; 2(N-1)/N·2n bytes for n
    numbers."""

    def __init__(self, group: dist.ProcessGroup, wire_dtype: torch.dtype, *, feedback: bool) -> None:
        super().__init__(group, feedback=feedback)
        self.wire_dtype = wire_dtype
        self.limit = torch.finfo(wire_dtype).max / (group.size() + 1)

    def encode(self, values: Tensor) -> Tensor:
        message = values.to(self.wire_dtype, copy=True)
        if 2 * self.limit < torch.finfo(values.dtype).max / self.group.size():  # else a dense sum would end there too
            message.clamp_(-self.limit, self.limit)
        return message

    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        return self.all_reduce(message)

    def take_out(self, message: Tensor, values: Tensor) -> None:
        values.sub_(message.to(values.dtype))

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.copy_(received)
