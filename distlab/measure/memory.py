"""The memory ledger: what a variant holds on this rank, by class, at rest and over a step.

    with MemoryLedger(device) as memory:
        strategy = ...                        # made, and warm
        with memory.step():
            strategy.backward(batch)
            strategy.update()
    memory.rest, memory.peak, memory.history(), memory.line()

At rest is after the update, before the next step: gradients are still held, the batch and what autograd saved are gone.
Bytes that were alive before the block, a data set's, belong to no class. Classes are told apart afterwards
(below): a storage that turns out to be a gradient was one from its first byte.

The process sees the same memory from outside: `seen_outside` puts both side by side.
"""

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.measure.event_order import Order
from distlab.measure.process_memory import outside

# Storages: what memory tensors hold, from when each piece of it is born until it dies.
#
# On the CPU no allocator keeps count, so a dispatch mode does: it meets every storage that an operation takes or
# returns, once for all its views, and a weak reference tells when it dies. Storages grow and shrink too (fully_shard
# frees its parameters with `resize_(0)`), so UntypedStorage.resize_ is wrapped meanwhile. What a kernel allocates and
# frees inside one operation stays unseen.
#
# Of each storage a `Life` stays behind: its sizes over time, and the labels that somebody gave it. What a storage was
# for is often known only later (a gradient is one when autograd hands it over), so the lives are read when all is
# done.

COMMUNICATION = "communication"  # the label of what a collective, a send or a receive was given
LET_GO_S = 0.05  # of three ranks on two cores the longest took 4 ms


class Life:
    """A storage: (time_s, bytes from then on) for every change, the last of 0 bytes if it died, its labels, and when an
    operation last met it."""

    __slots__ = ("labels", "seen_at", "sizes")

    def __init__(self) -> None:
        self.sizes: list[tuple[float, int]] = []
        self.labels: set[str] = set()
        self.seen_at = 0.0

    @property
    def nbytes(self) -> int:
        return self.sizes[-1][1] if self.sizes else 0


class Listener(Protocol):
    """Who wants to hear of calls and of storages that grow or shrink: event_order.py."""

    def called(self, name: str, args: Any, result: Any, tensors: list[torch.Tensor]) -> None: ...

    def resized(self, storage: torch.UntypedStorage) -> None: ...


class Storages(TorchDispatchMode):
    """The storages on one kind of device: `lives` so far, `live_bytes` now, `peak_bytes` at most; a `listener` hears of
    calls."""

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.listener: Listener | None = None
        self._lives: list[Life] = []
        self.device_type = device_type
        self._live_bytes = 0
        self._thread = threading.get_ident()
        self._dead: deque[tuple[int, float | None]] = deque()  # only noted: gloo's thread may be the one that lets go
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Life]] = {}  # by address of the storage

    def add(self, tensor: torch.Tensor, *labels: str) -> None:
        """Count a tensor's storage from now on, at its present size, under further `labels`."""
        for plain in _plain(tensor):
            storage = plain.untyped_storage()
            if storage.device.type == self.device_type:
                self.measure(storage).labels.update(labels)

    def was(self, tensor: torch.Tensor, label: str) -> bool:
        """Whether memory of this tensor is counted under a label."""
        self._bury()
        keys = [plain.untyped_storage()._cdata for plain in _plain(tensor)]
        return any(label in self._alive[key][1].labels for key in keys if key in self._alive)

    def measure(self, storage: torch.UntypedStorage) -> Life:
        """Count a storage at its present size."""
        self._bury()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            life = self._alive[key][1]
        else:
            life = Life()
            self._lives.append(life)
            self._alive[key] = weakref.ref(storage, lambda _: self._dead.append((key, self._died_at()))), life
        life.seen_at = time.perf_counter()
        if nbytes != life.nbytes:
            self._live_bytes += nbytes - life.nbytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            life.sizes.append((life.seen_at, nbytes))
        return life

    def _died_at(self) -> float | None:
        """Now; None where another thread let go last, which it does some time after the rank: then the storage ended
        when it was last met.

        With 10 busy processes beside 5 ranks a message of a sum stood in the peak of the next one in 1 of 8 runs.
        """
        return time.perf_counter() if threading.get_ident() == self._thread else None

    def let_go(self, owned: Iterable[torch.Tensor]) -> None:
        """Wait until all that a call was given is dead, but for what is `owned`; what a strategy keeps takes LET_GO_S.

        A call has returned before gloo's thread lets go of its tensors (one of six in a loop of all_reduces), and that
        thread must first get the interpreter's lock.
        """
        kept = {plain.untyped_storage()._cdata for tensor in owned for plain in _plain(tensor)}
        until = time.perf_counter() + LET_GO_S
        while self._messages() - kept and time.perf_counter() < until:
            time.sleep(0.001)

    def _messages(self) -> set[int]:
        """Addresses of the storages alive that a call was given."""
        self._bury()
        return {key for key, (_, life) in self._alive.items() if COMMUNICATION in life.labels and life.nbytes}

    @property
    def lives(self) -> list[Life]:
        self._bury()
        return self._lives

    @property
    def live_bytes(self) -> int:
        self._bury()
        return self._live_bytes

    def _bury(self) -> None:
        while self._dead:
            key, died_at = self._dead.popleft()
            life = self._alive.pop(key)[1]
            self._live_bytes -= life.nbytes
            life.sizes.append((life.seen_at if died_at is None else died_at, 0))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for this class, 822 modules, to leave out what nobody compiles here."""
        return False

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._bury()
        del torch.UntypedStorage.resize_  # the wrapper: the method itself is the base class's


def _tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in no order."""
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
    """The tensors that hold the memory: a DTensor's local one, itself where it is dense."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # since torch 2.13 the mesh is a part, too
                yield from _plain(part)
    elif tensor.layout == torch.strided:
        yield tensor


# Purposes: what a storage is for, found without a word from the strategy that made it.
#
#     parameters      the memory behind every nn.Parameter alive
#     optimizer       what a torch.optim.Optimizer remembers of them, and master weights: the lab's models are of one
#                     dtype, so a parameter that is kept more exactly than another is its master
#     gradients       every `.grad`, and what autograd hands over for a parameter: ZeRO-2 consumes it at once
#     communication   what a collective, a send or a receive was given
#     activations     all else: what autograd saves for the backward pass, the batch, what an operation leaves for the
#                     next
#
# Who is two things is the stronger one: parameters, optimizer, gradients, saved activations, communication. So a
# bucket of which gradients are views is a gradient although it is summed over the ranks, and a gathered weight is a
# parameter.

# As they are drawn, from the ground up.
CLASSES = ("parameters", "gradients", "optimizer", "activations", COMMUNICATION)
BEFORE, SAVED = "before", "saved"
_STRONGEST_FIRST = ("parameters", "optimizer", "gradients", SAVED, COMMUNICATION)


def class_of(life: Life) -> str:
    """The one of CLASSES that a storage counts under."""
    label = next((label for label in _STRONGEST_FIRST if label in life.labels), SAVED)
    return "activations" if label == SAVED else label


class Owners:
    """Who gives memory its purpose, as far as it is alive now: parameters, with their gradients, and optimizers."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        found = list(_alive((Tensor, torch.optim.Optimizer)))
        # fully_shard's are DTensors by type; an outline's, on the meta device, hold nothing.
        self.parameters = [
            thing for thing in found if isinstance(thing, nn.Parameter) and thing.device.type == storages.device_type
        ]
        # What was alive before is another's: a leftover in 16 bits would make masters of all weights.
        ours = [parameter.itemsize for parameter in self.parameters if not storages.was(parameter, BEFORE)]
        self._model_itemsize = min(ours, default=0)
        self.optimizers = [thing for thing in found if isinstance(thing, torch.optim.Optimizer)]

    def label(self) -> None:
        """Label what they hold now."""
        for tensor, label in self._held():
            self._storages.add(tensor, label)

    def let_go(self) -> None:
        """Wait until messages that nobody here owns are dead: gloo's thread holds one a little longer than its call."""
        self._storages.let_go([tensor for tensor, _ in self._held()])

    def _held(self) -> Iterator[tuple[Tensor, str]]:
        """Each tensor with its purpose."""
        for parameter in self.parameters:
            yield parameter, "optimizer" if parameter.itemsize > self._model_itemsize else "parameters"
            if parameter.grad is not None:
                yield parameter.grad, "gradients"
        for state in [state for optimizer in self.optimizers for state in optimizer.state.values()]:
            yield from ((value, "optimizer") for value in state.values() if isinstance(value, Tensor))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Label every gradient that autograd hands to a parameter inside the block."""
        add = self._storages.add
        hooks = [
            parameter.register_hook(lambda gradient: add(gradient, "gradients"))
            for parameter in self.parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def label_before(storages: Storages) -> None:
    """Count all tensors alive, their gradients too, as there before."""
    gc.collect()  # or garbage would count
    for tensor in _alive(Tensor):
        storages.add(tensor, BEFORE)
        if tensor.is_leaf and tensor.grad is not None:
            storages.add(tensor.grad, BEFORE)


def _alive(kinds: Any) -> Iterator[Any]:
    """All objects of these types; by their type, for a proxy whose object is gone cannot be asked."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), kinds))


POINTS = 200  # of the line over a step
ByClass = dict[str, int]  # bytes, by CLASSES


class MemoryLedger:
    """`rest`, `peak`, `history()` and `line()` of the one `step()` inside the block; `peak_bytes` of the whole
    block."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._storages = Storages(torch.device(device).type)
        self._outside = outside(torch.device(device))
        self._began = self._ended = self._rested = 0.0

    def __enter__(self) -> Self:
        label_before(self._storages)
        self._outside.begin()
        self._storages.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._storages.__exit__(kind, error, trace)

    @contextmanager
    def step(self, order: Order | None = None) -> Iterator[None]:
        """Around one step, recorded in `order`; afterwards the rank is at rest."""
        order = order or Order({})
        owners = Owners(self._storages)
        owners.label()
        self._outside.begin_step()
        with owners.watched(), order.watched():
            self._storages.listener = order
            self._began = time.perf_counter()
            yield
            self._ended = time.perf_counter()
            self._storages.listener = None
        self._outside.end_step()
        owners.label()
        del owners
        gc.collect()  # what a cycle keeps goes at the collector's whim
        Owners(self._storages).let_go()
        self._rested = time.perf_counter()
        self._outside.at_rest()

    def saves(self, tensor: Tensor) -> None:
        """Autograd keeps this tensor for the backward pass."""
        self._storages.add(tensor, SAVED)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once since the block began, those from before among them; on CUDA the allocator's
        own."""
        return self._storages.peak_bytes if self._outside.most_bytes is None else self._outside.most_bytes

    @property
    def rest(self) -> ByClass:
        """Bytes by class after the step."""
        return self._held(self._rested)

    @property
    def peak(self) -> ByClass:
        """Bytes by class when the step held most."""
        return max((held for _, held in self.history()), key=total)

    @property
    def most(self) -> ByClass:
        """Bytes of each class when the step held most of it."""
        held = [held for _, held in self.history()]
        return {name: max(each[name] for each in held) for name in CLASSES}

    def history(self) -> list[tuple[float, ByClass]]:
        """(time_s, bytes by class) at the begin, after every change, and at the end of the step."""
        held = self._held(self._began)
        history = [(self._began, held)]
        for moment, name, change in self._changes:
            if self._began < moment <= self._ended:
                held = held | {name: held[name] + change}
                history.append((moment, held))
        return [*history, (self._ended, held)]

    def line(self, points: int = POINTS) -> dict[str, list[int]]:
        """Bytes by class in each of `points` equal parts of the step, each when it held most: the peak is among them.

        A part may hold many changes, so a line need not begin at rest: `history` has each change.
        """
        history = self.history()
        highest = [history[0][1]] * points
        part, last = 0, history[0][1]
        for moment, held in history:
            now = min(int((moment - self._began) / self.step_s * points), points - 1)
            for between in range(part + 1, now + 1):
                highest[between] = last  # it begins with what the part before ended with
            part, last = now, held
            highest[part] = max(highest[part], held, key=total)
        return {name: [held[name] for held in highest] for name in CLASSES}

    @property
    def step_s(self) -> float:
        """How long the step took under the ledger, which slows it down."""
        return self._ended - self._began

    def seen_outside(self) -> dict[str, tuple[int, int]]:
        """(counted, seen) bytes by name of a comparison, such as "process bytes"; only what can be seen here."""
        rest, peak = total(self.rest), total(self.peak)
        return {f"{source} bytes": (rest, seen) for source, seen in self._outside.rest.items()} | {
            f"{source} peak bytes": (peak, seen) for source, seen in self._outside.peak.items()
        }

    def _held(self, at: float) -> ByClass:
        """Bytes by class at a moment."""
        held = dict.fromkeys(CLASSES, 0)
        for moment, name, change in self._changes:
            held[name] += change if moment <= at else 0
        return held

    @cached_property
    def _changes(self) -> list[tuple[float, str, int]]:
        """(time_s, class, bytes more) of everything that was not there before, in order of time."""
        changes = []
        for life in self._storages.lives:
            if BEFORE not in life.labels:
                name, sizes = class_of(life), [0, *(nbytes for _, nbytes in life.sizes)]
                changes += [(now[0], name, now[1] - before) for before, now in zip(sizes, life.sizes, strict=False)]
        return sorted(changes)


def total(held: ByClass) -> int:
    """Bytes of all classes."""
    return sum(held.values())
