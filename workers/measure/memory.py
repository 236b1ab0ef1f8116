"""The memory ledger: what a variant holds on this rank, by class, at rest and over a step.

    with MemoryLedger(device) as memory:
        strategy = ...                        # made, and warm
        with memory.step():
            strategy.backward(batch)
            strategy.update()
    memory.rest, memory.peak, memory.history(), memory.line()

At rest is after the update, before the next step: gradients are still held, the batch and what autograd saved are gone.
Bytes that were alive before the block, a data set's, belong to no class. Classes are told apart afterwards
(purposes.py): a storage that turns out to be a gradient was one from its first byte.

The process sees the same memory from outside: `seen_outside` puts both side by side.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from workers.measure.order import Order
from workers.measure.outside import outside
from workers.measure.purposes import BEFORE, CLASSES, SAVED, Owners, class_of, label_before
from workers.measure.storages import Storages

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
