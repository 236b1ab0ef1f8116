"""The memory ledger: a variant's memory on this rank, by class, at rest and over a step.

    with MemoryLedger(device) as memory:
        strategy = ...                        # made, with its warm-up steps done
        with memory.step():
            strategy.backward(batch)
            strategy.update()
    memory.rest, memory.peak, memory.history(), memory.line()

At rest is after the update, before the next step: gradients are still alive, the batch and saved activations are not.
Bytes alive before the block, such as a data set, belong to no class. Classes are assigned afterwards (see below): a
storage that becomes a gradient counts as one from its allocation.

The system counts the same memory: `compared_with_system` compares both.
"""

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from distlab.lab.measure.event_order import Order
from distlab.lab.measure.storages import BEFORE, COMMUNICATION, Life, Storages, alive, label_before

# The purpose of a storage, found without the help of the strategy.
#
#     parameters      the memory behind every nn.Parameter alive
#     optimizer       state of a torch.optim.Optimizer, and master weights: the lab's models have one
#                     dtype, so a parameter of higher precision than another is its master
#     gradients       every `.grad`, and each gradient from autograd, because ZeRO-2 consumes it immediately
#     communication   arguments of a collective, a send or a receive
#     activations     all else: tensors that autograd saves for the backward pass, the batch, results of
#                     operations
#
# If a storage has several purposes, the first of these counts: parameters, optimizer, gradients, saved activations,
# communication. So a bucket with gradients as views counts as gradients although it is sent, and a gathered weight
# counts as a parameter.

# In the order of the chart, from the bottom up.
CLASSES = ("parameters", "gradients", "optimizer", "activations", COMMUNICATION)
SAVED = "saved"
_STRONGEST_FIRST = ("parameters", "optimizer", "gradients", SAVED, COMMUNICATION)


def class_of(life: Life) -> str:
    label = next((label for label in _STRONGEST_FIRST if label in life.labels), SAVED)
    return "activations" if label == SAVED else label


class Owners:
    """The live objects that give memory its purpose: parameters, with gradients, and optimizers."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        found = list(alive((Tensor, torch.optim.Optimizer)))
        # fully_shard's are DTensors by type; those on the meta device have no memory.
        self.parameters = [
            each for each in found if isinstance(each, nn.Parameter) and each.device.type == storages.device_type
        ]
        # Skip older objects: a leftover in 16 bits would make all weights masters.
        ours = [parameter.itemsize for parameter in self.parameters if not storages.has_label(parameter, BEFORE)]
        self._model_itemsize = min(ours, default=0)
        self.optimizers = [each for each in found if isinstance(each, torch.optim.Optimizer)]

    def label(self) -> None:
        for tensor, label in self._held():
            self._storages.add(tensor, label)

    def wait_until_freed(self) -> None:
        """Wait until messages without an owner are freed: gloo's thread keeps them slightly longer than the call."""
        self._storages.wait_until_freed([tensor for tensor, _ in self._held()])

    def _held(self) -> Iterator[tuple[Tensor, str]]:
        for parameter in self.parameters:
            yield parameter, "optimizer" if parameter.itemsize > self._model_itemsize else "parameters"
            if parameter.grad is not None:
                yield parameter.grad, "gradients"
        for state in [state for optimizer in self.optimizers for state in optimizer.state.values()]:
            yield from ((value, "optimizer") for value in state.values() if isinstance(value, Tensor))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Label every gradient that autograd produces for a parameter inside the block."""
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


POINTS = 200  # of the line over a step
ByClass = dict[str, int]  # bytes, by CLASSES


class MemoryLedger:
    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._storages = Storages(torch.device(device).type)
        self._system = system_counter(torch.device(device))
        self._began = self._ended = self._rest_at = 0.0

    def __enter__(self) -> Self:
        label_before(self._storages)
        self._system.begin()
        self._storages.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._storages.__exit__(*error)

    @contextmanager
    def step(self, order: Order | None = None) -> Iterator[None]:
        """Measure one step, recorded in `order`; afterwards the rank is at rest."""
        order = order or Order({})
        owners = Owners(self._storages)
        owners.label()
        self._system.begin_step()
        with owners.watched(), order.watched():
            self._storages.listener = order
            self._began = time.perf_counter()
            yield
            self._ended = time.perf_counter()
            self._storages.listener = None
        self._system.end_step()
        owners.label()
        del owners
        gc.collect()  # memory in cycles is freed at arbitrary times
        Owners(self._storages).wait_until_freed()
        self._rest_at = time.perf_counter()
        self._system.at_rest()

    def saves(self, tensor: Tensor) -> None:
        """Record that autograd saves this tensor for the backward pass."""
        self._storages.add(tensor, SAVED)

    @property
    def peak_bytes(self) -> int:
        """Return the peak bytes since the block began, with earlier ones; on CUDA the allocator's number."""
        return self._storages.peak_bytes if self._system.most_bytes is None else self._system.most_bytes

    @property
    def rest(self) -> ByClass:
        return self._held(self._rest_at)

    @property
    def peak(self) -> ByClass:
        return max((held for _, held in self.history()), key=total)

    @property
    def most(self) -> ByClass:
        """Return each class' peak bytes in the step."""
        held = [held for _, held in self.history()]
        return {name: max(each[name] for each in held) for name in CLASSES}

    def history(self) -> list[tuple[float, ByClass]]:
        """Return (time_s, bytes by class) at the step's begin, after every change, and at its end."""
        held = self._held(self._began)
        history = [(self._began, held)]
        for moment, name, change in self._changes:
            if self._began < moment <= self._ended:
                held = held | {name: held[name] + change}
                history.append((moment, held))
        return [*history, (self._ended, held)]

    def line(self, points: int = POINTS) -> dict[str, list[int]]:
        """Return bytes by class at the peak of each of `points` equal parts of the step.

        A part may have many changes, so a line need not begin at rest: `history` has each change.
        """
        history = self.history()
        highest = [history[0][1]] * points
        part, last = 0, history[0][1]
        for moment, held in history:
            now = min(int((moment - self._began) / self.step_s * points), points - 1)
            for between in range(part + 1, now + 1):
                highest[between] = last  # a part without changes has the bytes at the end of the part before
            part, last = now, held
            highest[part] = max(highest[part], held, key=total)
        return {name: [held[name] for held in highest] for name in CLASSES}

    @property
    def step_s(self) -> float:
        """Return the step's time with the ledger, which slows it down."""
        return self._ended - self._began

    def compared_with_system(self) -> dict[str, tuple[int, int]]:
        """Return (counted, seen) bytes by name, such as "process bytes", as far as the system reports them."""
        rest, peak = total(self.rest), total(self.peak)
        return {f"{source} bytes": (rest, seen) for source, seen in self._system.rest.items()} | {
            f"{source} peak bytes": (peak, seen) for source, seen in self._system.peak.items()
        }

    def _held(self, at: float) -> ByClass:
        held = dict.fromkeys(CLASSES, 0)
        for moment, name, change in self._changes:
            held[name] += change if moment <= at else 0
        return held

    @cached_property
    def _changes(self) -> list[tuple[float, str, int]]:
        """Return (time_s, class, added bytes) of all new storages, in order of time."""
        changes = []
        for life in self._storages.lives:
            if BEFORE not in life.labels:
                name, sizes = class_of(life), [0, *(nbytes for _, nbytes in life.sizes)]
                changes += [(now[0], name, now[1] - before) for before, now in zip(sizes, life.sizes, strict=False)]
        return sorted(changes)


def total(held: ByClass) -> int:
    return sum(held.values())


# --- the same memory as the system counts it ---
#
# The resident pages of the process and of the container contain more than tensors: code that ran for the first time,
# and buffers of gloo and Python. So we measure their growth since before the strategy was made. Freed memory that
# malloc keeps is first returned to the kernel, if the C library can do that. The peak is the kernel's high-water mark,
# which we reset if the kernel allows it. A container with several ranks counts all of them, without the page cache that
# the kernel would reclaim first, like `docker stats`.
#
# A model of 10M parameters with AdamW is 163.8 MB of tensors and 164.2 MB of pages, at the peak 245.8 and 246.2 MB. In
# a small run the first variant is 2 to 4 MB higher, because its code runs for the first time (76 MB for PyTorch's
# DTensor), and every peak is 2 to 10 MB higher, because of buffers of kernels and gloo.

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 50  # without a limit v1 reports a number near 2^63


class ContainerMemory:
    """`used_bytes()` of this container, `limit_bytes` and their `share()`; None outside of a container."""

    def __init__(self, cgroup: Path = CGROUP) -> None:
        v1 = cgroup / "memory"
        self._is_v1 = not (cgroup / "memory.max").exists()
        if self._is_v1:
            usage, limit = v1 / "memory.usage_in_bytes", v1 / "memory.limit_in_bytes"
        else:
            usage, limit = cgroup / "memory.current", cgroup / "memory.max"
        self._usage, self._stat = usage, usage.with_name("memory.stat")
        self.limit_bytes = self._limit(limit)

    @staticmethod
    def _limit(path: Path) -> int | None:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no cgroup, or the word "max"
            return None
        return limit if limit < UNLIMITED_BYTES else None

    def used_bytes(self) -> int | None:
        """Return the bytes of all its processes; in v1 only with a limit, else it may be the whole machine."""
        return self._used_without("inactive_file")

    def kept_bytes(self) -> int | None:
        """Return the bytes without page cache, which the kernel cannot reclaim near the limit."""
        return self._used_without("inactive_file", "active_file")

    def _used_without(self, *caches: str) -> int | None:
        if self._is_v1 and self.limit_bytes is None:
            return None
        try:
            used = int(self._usage.read_text())
            stat = dict(line.split() for line in self._stat.read_text().splitlines())
            return used - sum(int(stat.get(f"total_{name}" if self._is_v1 else name, 0)) for name in caches)
        except (OSError, ValueError):
            return None

    def share(self) -> float | None:
        used = self.used_bytes() if self.limit_bytes is not None else None
        return None if used is None or self.limit_bytes is None else round(used / self.limit_bytes, 3)


PROCESS = Path("/proc/self")


class Process:
    """Growth of the process and its container: `rest` and `peak` in bytes by source, empty if unknown."""

    most_bytes = None  # since `begin`: only an allocator reports it

    def __init__(self, container: ContainerMemory) -> None:
        self.rest: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._container = container
        self._start: dict[str, int] = {}

    def begin(self) -> None:
        self._start = self._now()

    def begin_step(self) -> None:
        """Reset the peak."""
        trim_heap()
        with suppress(OSError):  # if it is forbidden, the mark is older, and no peak is reported
            (PROCESS / "clear_refs").write_text("5")
            self.peak = {"process": 0}

    def end_step(self) -> None:
        if self.peak:
            self.peak["process"] = _status_bytes("VmHWM") - self._start["process"]

    def at_rest(self) -> None:
        now = self._now()
        self.rest = {source: now[source] - nbytes for source, nbytes in self._start.items() if source in now}

    def _now(self) -> dict[str, int]:
        trim_heap()
        used = {"process": _status_bytes("VmRSS")} if PROCESS.exists() else {}
        container = self._container.kept_bytes()
        if container is None or self._container.limit_bytes is None:  # without a limit it may be the whole machine
            return used
        return used | {"container": container}


class Allocator:
    """Growth of CUDA's caching allocator, which rounds up to 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        self.rest: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._device = device
        self._start = self._most_until_step = 0

    @property
    def most_bytes(self) -> int:
        """Return the allocator's peak since `begin`."""
        return max(self._most_until_step, torch.cuda.max_memory_allocated(self._device))

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)

    def begin_step(self) -> None:
        self._most_until_step = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def end_step(self) -> None:
        self.peak = {"allocator": torch.cuda.max_memory_allocated(self._device) - self._start}

    def at_rest(self) -> None:
        self.rest = {"allocator": torch.cuda.memory_allocated(self._device) - self._start}


def system_counter(device: torch.device) -> Process | Allocator:
    """Return the system's counter of this device's memory."""
    return Allocator(device) if device.type == "cuda" else Process(ContainerMemory())


def trim_heap() -> None:
    """Return freed memory to the kernel (only with glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(name: str) -> int:
    lines = (line.split() for line in (PROCESS / "status").read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == f"{name}:")
