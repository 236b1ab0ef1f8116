"""Memory: the bytes of tensor storages alive, and their peak.

On the CPU no allocator keeps count, so a dispatch mode does: it meets every storage that an operation takes or returns, once
for all its views, and a weak reference tells when it dies. Storages grow and shrink too (fully_shard frees its parameters with
`resize_(0)`), so UntypedStorage.resize_ is wrapped meanwhile. What a kernel allocates and frees inside one operation stays
unseen. On CUDA the allocator's own peak is taken.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """The storages alive on the CPU: `live_bytes` now, `peak_bytes` at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._dead: deque[int] = deque()  # only noted: gloo's thread may be the one that lets go of a storage
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by address of the storage

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from now on, at its present size."""
        for plain in _plain(tensor):
            storage = plain.untyped_storage()
            if storage.device.type == "cpu":
                self.measure(storage)

    def measure(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its present size."""
        self._bury()
        key, nbytes = storage._cdata, storage.nbytes()
        reference, counted = self._alive.get(key) or (weakref.ref(storage, lambda _: self._dead.append(key)), 0)
        self._alive[key] = reference, nbytes
        self._live_bytes += nbytes - counted
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    @property
    def live_bytes(self) -> int:
        self._bury()
        return self._live_bytes

    def _bury(self) -> None:
        while self._dead:
            self._live_bytes -= self._alive.pop(self._dead.popleft())[1]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor first turns into operations on its local tensor
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs, result)):
            self.add(tensor)
        return result


class PeakMemory:
    """`with PeakMemory() as memory: ...` then `memory.peak_bytes`. Tensors alive before count from the start."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._storages = Storages()

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        gc.collect()  # or garbage would count
        for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]:
            self._storages.add(tensor)
        resize = torch.UntypedStorage.resize_

        def measured(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            self._storages.measure(storage)
            return resized

        torch.UntypedStorage.resize_ = measured  # type: ignore[assignment, method-assign]
        self._storages.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cpu":
            self._storages.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            del torch.UntypedStorage.resize_  # the wrapper: the method itself is the base class's

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at once since the block began."""
        return (
            torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else self._storages.peak_bytes
        )


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the memory: a DTensor's local one, a parameter's gradient beside it."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # since torch 2.13 the mesh is a part, too
                yield from _plain(part)
    elif tensor.layout == torch.strided:
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield from _plain(tensor.grad)
