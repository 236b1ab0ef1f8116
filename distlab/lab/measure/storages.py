"""Track the memory of tensors from allocation until it is freed, and what autograd saves.

On the CPU no allocator counts bytes, so a dispatch mode does (`Storages`): it sees every storage in the arguments and
results of an operation, once for all its views, and a weak reference reports when it is freed. Storages also grow and
shrink (fully_shard frees its parameters with `resize_(0)`), so UntypedStorage.resize_ is wrapped meanwhile. Memory that
a kernel allocates and frees inside one operation is not seen. Each storage has a `Life`: its sizes over time, and its
labels. The purpose of a storage is often known only later (a gradient is one when autograd returns it), so the lives
are read at the end.

Activations are the bytes that autograd keeps for the backward pass (`SavedActivations`): every tensor that an operation
saves passes through a hook, which counts its storage until the graph's last reference to it is gone. A tensor that
several operations save counts once, a view counts as its whole storage, and weights do not count. This is the memory
that a pipeline's schedule bounds and that sequence parallelism divides (Korthikanti et al. 2022, section 4, counts the
same). Tensors kept by torch.utils.checkpoint would not be seen, because it has its own hooks; tensors kept by
distlab/lab/workload/model.py are seen, because an operation saves them.
"""

import gc
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from distlab.lab.measure.event_order import Order, key_of, storage_of
from distlab.lab.measure.traffic import DispatchMode

COMMUNICATION = "communication"  # the label of arguments of a collective, a send or a receive
FREED_WITHIN_S = 0.05  # with three ranks on two cores at most 4 ms were needed


@dataclass(slots=True)
class Life:
    """A storage: (time_s, bytes from then on) for every change, the last with 0 bytes if it was freed; its labels; and
    when an operation last used it."""

    sizes: list[tuple[float, int]] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    seen_at: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.sizes[-1][1] if self.sizes else 0


class Storages(DispatchMode):
    """The storages on one kind of device: `lives` so far, `live_bytes` now, and `peak_bytes`; a `listener` is notified
    of calls and of storages that grow or shrink."""

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.listener: Order | None = None
        self._lives: list[Life] = []
        self.device_type = device_type
        self._live_bytes = 0
        self._thread = threading.get_ident()
        self._freed: deque[tuple[int, float | None]] = deque()  # a queue, because gloo's thread may free a storage
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Life]] = {}  # by address of the storage

    def add(self, tensor: torch.Tensor, *labels: str) -> None:
        for plain in _plain(tensor):
            storage = plain.untyped_storage()
            if storage.device.type == self.device_type:
                self.measure(storage).labels.update(labels)

    def has_label(self, tensor: torch.Tensor, label: str) -> bool:
        """Return whether this tensor's memory has a label."""
        self._record_freed()
        keys = [plain.untyped_storage()._cdata for plain in _plain(tensor)]
        return any(label in self._alive[key][1].labels for key in keys if key in self._alive)

    def measure(self, storage: torch.UntypedStorage) -> Life:
        self._record_freed()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            life = self._alive[key][1]
        else:
            life = Life()
            self._lives.append(life)
            self._alive[key] = weakref.ref(storage, lambda _: self._freed.append((key, self._freed_at()))), life
        life.seen_at = time.perf_counter()
        if nbytes != life.nbytes:
            self._live_bytes += nbytes - life.nbytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            life.sizes.append((life.seen_at, nbytes))
        return life

    def _freed_at(self) -> float | None:
        """Return the time; None if another thread freed it, later than the rank: then it counts until its last use.

        With 10 busy processes next to 5 ranks, the message of a sum counted in the peak of the next one in 1 of 8 runs.
        """
        return time.perf_counter() if threading.get_ident() == self._thread else None

    def wait_until_freed(self, owned: Iterable[torch.Tensor]) -> None:
        """Wait until the arguments of calls are freed, except `owned` ones; at most FREED_WITHIN_S.

        A call returns before gloo's thread releases its tensors (one of six in a loop of all_reduces), and that thread
        must first acquire the interpreter's lock.
        """
        kept = {plain.untyped_storage()._cdata for tensor in owned for plain in _plain(tensor)}
        until = time.perf_counter() + FREED_WITHIN_S
        while self._messages() - kept and time.perf_counter() < until:
            time.sleep(0.001)

    def _messages(self) -> set[int]:
        self._record_freed()
        return {key for key, (_, life) in self._alive.items() if COMMUNICATION in life.labels and life.nbytes}

    @property
    def lives(self) -> list[Life]:
        self._record_freed()
        return self._lives

    @property
    def live_bytes(self) -> int:
        self._record_freed()
        return self._live_bytes

    def _record_freed(self) -> None:
        while self._freed:
            key, freed_at = self._freed.popleft()
            life = self._alive.pop(key)[1]
            self._live_bytes -= life.nbytes
            life.sizes.append((life.seen_at if freed_at is None else freed_at, 0))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor first turns into operations on its local tensor
        result = func(*args, **(kwargs or {}))
        tensors = _tensors((args, kwargs, result))
        calls = "c10d" in func.namespace  # and "_c10d_functional"
        if calls and self.listener is not None:
            self.listener.called(func._schema.name, args, result, tensors)
        for tensor in tensors:
            self.add(tensor, *[COMMUNICATION] * calls)
        return result

    def __enter__(self) -> Self:
        resize: Callable[[Any, int], Any] = torch.UntypedStorage.resize_

        def measured(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            if storage.device.type == self.device_type:
                self.measure(storage)
            if self.listener is not None:
                self.listener.resized(storage)
            return resized

        torch.UntypedStorage.resize_ = measured  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._record_freed()
        del torch.UntypedStorage.resize_  # only the wrapper: the method itself belongs to the base class


def _tensors(values: Any) -> list[torch.Tensor]:
    found, waiting = [], [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return found


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with the memory: a DTensor's local one, a dense tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # since torch 2.13 the mesh is a part, too
                yield from _plain(part)
    elif tensor.layout == torch.strided:
        yield tensor


BEFORE = "before"  # the label of memory outside of steps


def label_before(storages: Storages) -> list[Tensor]:
    """Label all live tensors and their gradients BEFORE, and return them."""
    gc.collect()  # else garbage would count
    found = list[Tensor](alive(Tensor))
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    for tensor in found:
        storages.add(tensor, BEFORE)
    return found


def alive(kinds: Any) -> Iterator[Any]:
    return (each for each in gc.get_objects() if issubclass(type(each), kinds))


@dataclass(slots=True, eq=False)
class SavedTensor:
    """One saved tensor; counts as long as the graph keeps it."""

    tensor: Tensor
    key: int
    meter: "SavedActivations"

    def __del__(self) -> None:
        self.meter.release(self.key)


class SavedActivations:
    """`with SavedActivations() as saved: ...` then `saved.peak_bytes`; forward passes outside of the block do not
    count.

    `on_saved` is called with every saved tensor that is no weight.
    """

    def __init__(self, on_saved: Callable[[Tensor], None] = lambda _: None) -> None:
        self._on_saved = on_saved
        self.live_bytes = self.peak_bytes = 0
        self._weights: set[int] = set()  # addresses of storages, as all keys here
        self._holders: Counter[int] = Counter()
        self._nbytes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Self:
        tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
        self._weights = {key_of(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def release(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live_bytes -= self._nbytes.pop(key)

    def _pack(self, tensor: Tensor) -> Tensor | SavedTensor:
        storage = storage_of(tensor)
        key = storage._cdata
        if key in self._weights:
            return tensor
        self._on_saved(tensor)
        if not self._holders[key]:
            self._nbytes[key] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._holders[key] += 1
        return SavedTensor(tensor, key, self)

    @staticmethod
    def _unpack(packed: Tensor | SavedTensor) -> Tensor:
        return packed.tensor if isinstance(packed, SavedTensor) else packed
