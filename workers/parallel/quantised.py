"""8 bits on the wire: codes on one scale, which an all_reduce can add.

Codes of ranks with scales of their own cannot be added, so a bucket has one scale for all ranks: the largest magnitude
that any of them holds, found by an all_reduce MAX of one number. And the sum has to fit into 8 bits as well: with codes
up to 127 two ranks already reach 254, which int8 wraps to -2. So a code is at most L = 127 // N, and N of them are at
most 127.

Why not wider? Bytes a rank sends for n numbers, by what is done about the sum:

                                        N = 2    4       8      levels
    codes up to 127 // N, all_reduce    1.0 n    1.5 n   1.75 n  +-63, +-31, +-15       this file
    codes up to 127, all_gather         1.0 n    3.0 n   7.0 n   +-127
    codes up to 127, int16 all_reduce   2.0 n    3.0 n   3.5 n   +-127
    float32                             4.0 n    6.0 n   7.0 n

The first sends least for every N above 2 and no more at 2; what its coarser codes leave out, the residual brings later.
Rounding is stochastic (Alistarh et al. 2017, "QSGD", section 3): up with the probability of the remainder, so that a
code is right on average and small gradients are not always rounded to nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.compression import OneMessage


class Quantised(OneMessage):
    """Codes of int8: value = code x scale, scale = largest magnitude / (127 // N). `seed` is a rank's own.

    A bucket of zeros gives zeros: a scale too small for its dtype's normal numbers is taken as 1, and all codes are 0
    then.
    """

    def __init__(self, group: dist.ProcessGroup, seed: int, *, feedback: bool) -> None:
        super().__init__(group, feedback=feedback)
        self.levels = 127 // group.size()
        self.scale = 1.0
        self._generator = torch.Generator().manual_seed(seed)

    def encode(self, values: Tensor) -> Tensor:
        self.scale = self.shared_scale(values)
        dtype = torch.promote_types(values.dtype, torch.float32)  # 16 bits hold no fraction beside a code
        codes = torch.rand(values.shape, generator=self._generator, dtype=dtype).to(values.device)
        codes.add_(values, alpha=1 / self.scale).floor_().clamp_(-self.levels, self.levels)
        return codes.to(torch.int8)

    def shared_scale(self, values: Tensor) -> float:
        """The same on every rank. This short all_reduce is waited for: no code can be written before."""
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high).to(torch.promote_types(values.dtype, torch.float32))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        scale = largest.item() / self.levels
        return scale if not scale < torch.finfo(values.dtype).tiny else 1.0

    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        return self.all_reduce(message)

    def take_out(self, message: Tensor, values: Tensor) -> None:
        values.sub_(message.to(values.dtype), alpha=self.scale)

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.copy_(received).mul_(self.scale)
