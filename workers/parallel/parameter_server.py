"""The parameter server as a state machine: weights, a clock for each worker, and the rules of who may go on.

A worker asks to start, computes a gradient at the weights that it is given, and pushes it. Meanwhile others push
theirs, so what it pushes was computed at old weights: its staleness is the number of updates that were applied in
between. Without a bound that is asynchronous SGD (Dean et al. 2012, "Large Scale Distributed Deep Networks", section
4.1, Downpour). With a bound it is stale synchronous parallel (Ho et al. 2013, "More Effective Distributed ML via a
Stale Synchronous Parallel Parameter Server", section 2): who has finished c steps may start the next if the slowest has
finished c - s at least; s = 0 is lockstep.

There is no process, no thread and no clock in here: whoever carries the messages calls in the order in which they come,
and the same order gives the same weights. A budget of steps ends the run: who is faster takes more of them.

    weights   [P]  flat, changed in place
    update    [P]  a gradient, or the sum of those of several steps: w becomes w - lr·update
"""

import random
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

START, PUSH, LEAVE = "start", "push", "leave"


class Event(NamedTuple):
    """What happened to one worker."""

    kind: str  # START, PUSH or LEAVE
    worker: int
    steps: int  # granted, delivered or lost
    number: int = 0  # of a push: its worker's first is 1


class ParameterServer:
    """The weights and the rules. `staleness` None sets no bound; `budget` is the number of steps of all workers
    together."""

    def __init__(
        self, weights: Tensor, workers: Iterable[int], *, lr: float, budget: int, staleness: int | None = None
    ) -> None:
        self.weights, self.lr, self.budget, self.staleness = weights, lr, budget, staleness
        self.clocks = dict.fromkeys(workers, 0)  # steps that each worker has finished, of those who are here
        self.history: list[Event] = []
        self._granted: dict[int, int] = {}  # steps under way
        self._numbers = dict.fromkeys(self.clocks, 0)  # pushes of each worker that were applied

    @property
    def spent(self) -> bool:
        """Whether no step is left to grant."""
        return self.budget <= 0

    def lead(self, worker: int) -> int:
        """Finished steps that `worker` is ahead of the slowest."""
        return self.clocks[worker] - min(self.clocks.values())

    def may_start(self, worker: int) -> bool:
        """Whether `start` may be answered now; when nothing is left, that answer is 0."""
        return self.spent or self.staleness is None or self.lead(worker) <= self.staleness

    def start(self, worker: int, most: int = 1) -> int:
        """Grant up to `most` steps from the present weights; 0: the run is over."""
        if worker in self._granted:
            raise ValueError(f"rank {worker} starts anew with steps under way")
        granted = min(most, self.budget)
        if granted > 0:
            self.budget -= granted
            self._granted[worker] = granted
            self.history.append(Event(START, worker, granted))
        return granted

    def may_push(self, worker: int) -> bool:  # noqa: ARG002  an order of events asks for the worker
        """Whether `push` may be applied now: always, unless an order of events is kept."""
        return True

    def push(self, worker: int, number: int, update: Tensor) -> None:
        """Apply the `number`-th update of `worker`: each exactly once, without gap or repetition, or ValueError."""
        if worker not in self.clocks:
            raise ValueError(f"rank {worker} has left: its update is not applied")
        if number != self._numbers[worker] + 1 or worker not in self._granted:
            raise ValueError(f"rank {worker} pushes update {number} after {self._numbers[worker]}")
        self._numbers[worker] = number
        steps = self._granted.pop(worker)
        self.weights.add_(update, alpha=-self.lr)
        self.clocks[worker] += steps
        self.history.append(Event(PUSH, worker, steps, number))

    def may_finish(self) -> bool:
        """Whether the weights are final: nothing is left to grant, and nothing under way."""
        return self.spent and not self._granted

    def leave(self, worker: int) -> None:
        """Go on without `worker`: nobody waits for its clock, and what it had under way is lost."""
        if worker in self.clocks:
            self.history.append(Event(LEAVE, worker, self._granted.pop(worker, 0)))
            del self.clocks[worker]

    def behind(self) -> list[int]:
        """For whom the others wait: the slowest, and at the end who has steps under way."""
        slowest = min(self.clocks.values(), default=0)
        return [
            rank for rank, clock in self.clocks.items() if (rank in self._granted if self.spent else clock == slowest)
        ]


class Ordered(ParameterServer):
    """Lets events come in the given order alone: workers compute where they are, and the result repeats to the bit."""

    def __init__(
        self, order: list[tuple[str, int]], weights: Tensor, workers: Iterable[int], *, lr: float, budget: int
    ) -> None:
        super().__init__(weights, workers, lr=lr, budget=budget)
        self.order = order

    def _is_next(self, kind: str, worker: int) -> bool:
        return len(self.history) < len(self.order) and self.order[len(self.history)] == (kind, worker)

    def may_start(self, worker: int) -> bool:
        return self.spent or self._is_next(START, worker)

    def may_push(self, worker: int) -> bool:
        return self._is_next(PUSH, worker)


def draw_order(seed: int, rules: ParameterServer, most: int = 1) -> list[tuple[str, int]]:
    """An order of events that `rules` allow, drawn by `seed`; any worker that may go on is as likely to be the next.

    `rules` are used up: their clocks have run when this returns.
    """
    draw = random.Random(seed)
    numbers: dict[int, int] = {}
    busy: set[int] = set()
    while not rules.may_finish():
        ready = [worker for worker in rules.clocks if worker in busy or (not rules.spent and rules.may_start(worker))]
        worker = draw.choice(ready)
        if worker in busy:
            numbers[worker] = numbers.get(worker, 0) + 1
            rules.push(worker, numbers[worker], torch.zeros_like(rules.weights))
        else:
            rules.start(worker, most)
        busy ^= {worker}
    return [(event.kind, event.worker) for event in rules.history]
