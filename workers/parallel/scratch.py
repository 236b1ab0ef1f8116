"""Scratch memory that is used again from call to call."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Scratch:
    """Buffers that no call uses now are kept for the next one."""

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, Tensor]] = []  # bytes, and the tensor of them that was lent last

    @contextmanager
    def lent(self, numel: int, like: Tensor) -> Iterator[Tensor]:
        """`numel` elements of unknown content, on the device and of the dtype of `like`, until the block ends."""
        buffer, tensor = self._same(numel, like) or self._fitting(numel, like)
        try:
            yield tensor
        finally:
            self._free.append((buffer, tensor))

    def _same(self, numel: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """One that was lent like this before: to view bytes anew takes 4 us, a tenth of a small call."""
        for index, (_, tensor) in enumerate(self._free):
            if tensor.numel() == numel and tensor.dtype == like.dtype and tensor.device == like.device:
                return self._free.pop(index)
        return None

    def _fitting(self, numel: int, like: Tensor) -> tuple[Tensor, Tensor]:
        nbytes = numel * like.element_size()
        fitting = [kept for kept in self._free if kept[0].numel() >= nbytes and kept[0].device == like.device]
        if fitting:
            smallest = min(fitting, key=lambda kept: kept[0].numel())
            self._free = [free for free in self._free if free is not smallest]
            buffer = smallest[0]
        else:
            # One that is too small for this call goes, so that growing sizes do not pile up.
            self._free = self._free[1:]
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return buffer, buffer[:nbytes].view(like.dtype)

    def spoil(self) -> None:
        """Overwrite what is kept with bytes that are NaN in every floating type."""
        for buffer, _ in self._free:
            buffer.fill_(255)

    def release(self) -> None:
        """Keep nothing."""
        self._free = []
