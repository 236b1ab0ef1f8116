"""Scratch memory that is used again from call to call."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Scratch:
    """Buffers that no call uses now are kept for the next one."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @contextmanager
    def lent(self, numel: int, like: Tensor) -> Iterator[Tensor]:
        """`numel` elements of unknown content, on the device and of the dtype of `like`, until the block ends."""
        nbytes = numel * like.element_size()
        fitting = [buffer for buffer in self._free if buffer.numel() >= nbytes and buffer.device == like.device]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._free = [free for free in self._free if free is not buffer]
        else:
            # One that is too small for this call goes, so that growing sizes do not pile up.
            self._free = self._free[1:]
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        try:
            yield buffer[:nbytes].view(like.dtype)
        finally:
            self._free.append(buffer)

    def spoil(self) -> None:
        """Overwrite what is kept with bytes that are NaN in every floating type."""
        for buffer in self._free:
            buffer.fill_(255)

    def release(self) -> None:
        """Keep nothing."""
        self._free = []
