"""Activations: the bytes that autograd holds for the backward pass, now and at most.

Every tensor that an operation saves passes through a hook, which counts its storage until the last reference of the
graph to it is gone: an activation that several operations save counts once, a view as the storage that it keeps alive,
and weights not at all, since they stay anyway. It is what a pipeline's schedule bounds and what sequence parallelism
divides (Korthikanti et al. 2022, section 4, counts the same). What torch.utils.checkpoint keeps and computes again
would not be seen, for it catches these tensors by hooks of its own; what distlab/workload/model.py keeps is saved by an
operation, and so it is.
"""

import gc
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn


class SavedTensor:
    """One saved tensor; counts as long as the graph keeps it."""

    __slots__ = ("key", "meter", "tensor")

    def __init__(self, tensor: Tensor, key: int, meter: "SavedActivations") -> None:
        self.tensor, self.key, self.meter = tensor, key, meter

    def __del__(self) -> None:
        self.meter.release(self.key)


class SavedActivations:
    """`with SavedActivations() as saved: ...` then `saved.peak_bytes`; forward passes outside of the block do not
    count.

    `also` hears of every tensor that is saved and is no weight.
    """

    def __init__(self, also: Callable[[Tensor], None] = lambda _: None) -> None:
        self._also = also
        self.live_bytes = self.peak_bytes = 0
        self._weights: set[int] = set()  # addresses of storages, as all keys here
        self._holders: Counter[int] = Counter()
        self._nbytes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Self:
        tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
        self._weights = {_storage(tensor)._cdata for tensor in tensors if isinstance(tensor, nn.Parameter)}
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def release(self, key: int) -> None:
        """One holder of a storage less."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live_bytes -= self._nbytes.pop(key)

    def _pack(self, tensor: Tensor) -> Tensor | SavedTensor:
        storage = _storage(tensor)
        key = storage._cdata
        if key in self._weights:
            return tensor
        self._also(tensor)
        if not self._holders[key]:
            self._nbytes[key] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._holders[key] += 1
        return SavedTensor(tensor, key, self)

    @staticmethod
    def _unpack(packed: Tensor | SavedTensor) -> Tensor:
        return packed.tensor if isinstance(packed, SavedTensor) else packed


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor; a DTensor's is that of its local part."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()
