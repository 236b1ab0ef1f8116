"""What happened at the server, written down by one who stands beside it.

A real asynchronous run happens once: which weights a worker had and which updates came between is known afterwards
only if somebody wrote it down. The witness sees every event in the order in which the server took it, and does what
Downpour's server does with an update, on weights of its own (Dean et al. 2012, algorithm 7.1): w becomes w - lr·update.
It shares no line with the server: weights that differ from its own, by a bit, are a wrong update rule, a lost update or
one that was applied twice. Of some pushes it keeps the weights that they began from and the update, for one process to
compute again (replay.py).

    weights  [P]  as they should be now
    update   [P]  as it arrived
"""

import random
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from workers.parallel.parameter_server import PUSH, START

KEPT_BYTES = 96 * 2**20  # of weights and updates that are kept for the replay; two pushes are kept whatever their size


class Seen(NamedTuple):
    """An event."""

    kind: str  # START, PUSH or LEAVE
    worker: int
    steps: int  # granted, delivered or lost
    number: int = 0  # of a push: its worker's first is 1
    checksum: float = 0.0  # of a start: of the weights that its worker is to have; of a push: of the update
    loss: float = 0.0  # of a push: what its worker saw


class Kept(NamedTuple):
    """A push that can be computed again."""

    worker: int
    first_step: int  # steps that its worker had finished before
    steps: int
    weights: Tensor  # [P] that it began from
    update: Tensor  # [P] that arrived


class Witness:
    """What is seen at a server of `workers` that begins from `weights`; `wanted` names the pushes to keep, None all.

    It keeps no more of them than `most_steps` steps and KEPT_BYTES hold.
    """

    def __init__(
        self, weights: Tensor, workers: Iterable[int], lr: float, wanted: set[tuple[int, int]] | None, most_steps: int
    ) -> None:
        self.weights, self.lr, self.wanted, self.most_steps = weights.clone(), lr, wanted, most_steps
        self.seen: list[Seen] = []
        self.kept: list[Kept] = []
        self.finished = dict.fromkeys(workers, 0)  # steps by worker, of those who left too
        self._pushes = dict.fromkeys(self.finished, 0)
        self._granted: dict[int, int] = {}
        self._began: dict[int, Tensor] = {}  # weights that pushes under way began from, of those that are kept

    def started(self, worker: int, steps: int) -> None:
        """`worker` has the weights of now, for `steps` steps."""
        self.seen.append(Seen(START, worker, steps, checksum=checksum(self.weights)))
        self._granted[worker] = steps
        if self._keeps(worker):
            self._began[worker] = self.weights.clone()

    def pushed(self, worker: int, number: int, update: Tensor, loss: float) -> None:
        """`update` was applied."""
        steps = self._granted.pop(worker)
        self.seen.append(Seen(PUSH, worker, steps, number, checksum(update), loss))
        self.weights.sub_(update, alpha=self.lr)
        began = self._began.pop(worker, None)
        if began is not None:
            self.kept.append(Kept(worker, self.finished[worker], steps, began, update.clone()))
        self.finished[worker] += steps
        self._pushes[worker] += 1

    def left(self, worker: int) -> None:
        """`worker` is gone, and what it had under way with it."""
        self.seen.append(Seen("leave", worker, self._granted.pop(worker, 0)))
        self._began.pop(worker, None)

    def _keeps(self, worker: int) -> bool:
        if self.wanted is None:
            return True
        num_kept = len(self.kept) + len(self._began)
        steps = sum(each.steps for each in self.kept) + sum(self._granted[each] for each in self._began)
        fits = steps < self.most_steps and 2 * num_kept * self.weights.nbytes < KEPT_BYTES
        return (worker, self._pushes[worker] + 1) in self.wanted and (num_kept < 2 or fits)


def drawn(seed: int, workers: int, pushes: int) -> set[tuple[int, int]]:
    """Pushes to keep, by worker and number: the first of each, and two more drawn by `seed` of the `pushes` that each
    makes where all are as fast."""
    draw = random.Random(seed)
    later = [(worker, number) for worker in range(workers) for number in range(2, pushes + 1)]
    return {(worker, 1) for worker in range(workers)} | set(draw.sample(later, min(2, len(later))))


def checksum(vector: Tensor) -> float:
    """By which a vector is known again: the sum of its numbers, in float64."""
    return float(vector.sum(dtype=torch.float64))


class Audit(NamedTuple):
    """What the events say of the promises."""

    lead: int  # the most finished steps that any worker was ahead of the slowest at a start
    staleness: list[int]  # of each push: updates of others since its worker took the weights
    steps: dict[int, list[int]]  # of each worker's pushes
    fetched: dict[int, list[float]]  # checksums of the weights that each worker is to have had at its starts
    pushed: dict[int, list[float]]  # checksums of each worker's updates, in the order in which they were applied
    wrong_numbers: int  # pushes that are not their worker's next


def audit(seen: Iterable[Seen], workers: Iterable[int]) -> Audit:
    """Read the events of `workers` from the first on."""
    clocks = dict.fromkeys(workers, 0)
    steps: dict[int, list[int]] = {worker: [] for worker in clocks}
    fetched: dict[int, list[float]] = {worker: [] for worker in clocks}
    pushed: dict[int, list[float]] = {worker: [] for worker in clocks}
    staleness: list[int] = []
    lead, wrong_numbers, taken_at = 0, 0, {}
    for event in seen:
        worker = event.worker
        if event.kind == START:
            lead = max(lead, clocks[worker] - min(clocks.values()))
            taken_at[worker] = len(staleness)
            fetched[worker].append(event.checksum)
        elif event.kind == PUSH:
            staleness.append(len(staleness) - taken_at[worker])
            steps[worker].append(event.steps)
            pushed[worker].append(event.checksum)
            wrong_numbers += event.number != len(pushed[worker])
            clocks[worker] += event.steps
        else:
            del clocks[worker]
    return Audit(lead, staleness, steps, fetched, pushed, wrong_numbers)
