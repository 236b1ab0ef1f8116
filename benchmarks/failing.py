"""One rank of an elastic training whose failures come by the clock: benchmarks/goodput.py calls `trained` on each.

An event comes at its second, at the next step that its rank computes. Who is killed hangs up, as the kernel does for
it, forgets all, and comes back where the variant lets it. Who is paused stands still, and all who wait for it.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.flips import lab_of
from distlab import faults
from distlab.config import Config
from distlab.config.fault_spec import FaultSpec, arrivals
from distlab.elastic.membership import View
from distlab.elastic.strategy import Survivor
from distlab.experiments.elastic import POLICIES
from distlab.experiments.elastic.network import open_net, settle
from distlab.experiments.elastic.recovery import COMPUTED, Course, Drill, Killed
from distlab.lab import Lab

LEAST = 3  # members of whom one may be killed: two that die at once would leave nobody


class Plan(NamedTuple):
    """One run."""

    name: str  # of its folder, another each time
    variant: str
    steps: int
    saved_every: int
    faults: Sequence[FaultSpec]
    seed: int
    settings: dict[str, str]


class Told(NamedTuple):
    """What one rank tells of its run, in seconds; `began_at` and `ended_at` in Unix time."""

    began_at: float
    ended_at: float  # of who was outside then: began_at
    killed: int
    step_s: float  # from one step that stands to the next, the median
    down_s: list[float]  # from each loss to the next step, while this rank lived
    saves_s: list[float]  # that each checkpoint took


class ByTheClock(Drill):
    """The events of this rank, each as it computes a step once its second has come."""

    def __init__(self, events: Iterator[FaultSpec], rank: int, began_at: float) -> None:
        super().__init__([], rank)
        self.began_at, self.killed = began_at, 0
        self.num_members: Callable[[], int] = lambda: 0
        self._coming = (event for event in events if event.rank == rank)
        self._next = next(self._coming, None)

    def at(self, step: int, moment: str) -> None:  # noqa: ARG002  the clock says when
        """Raise `Killed` where this rank is killed now; stand still where it is paused."""
        while moment == COMPUTED and self._next is not None and (self._next.at_s or 0) < time.time() - self.began_at:
            event, self._next = self._next, next(self._coming, None)
            if event.kind == "pause":
                faults.pause(event.duration_s or 0.0)
            elif self.num_members() >= LEAST:
                self.killed += 1
                raise Killed


class Clocked(Course):
    """A rank's way that notes when steps stand and how long none did."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.stood_at: list[float] = []  # in Unix time, of all lives
        self.down_s: list[float] = []
        self.saves_s: list[float] = []
        self._lost_at = 0.0

    def committed(self) -> None:
        """A step stands."""
        self.stood_at.append(time.time())
        if self._lost_at:
            self.down_s.append(self.stood_at[-1] - self._lost_at)
            self._lost_at = 0.0
        super().committed()
        if self.training.applied % self.saved_every == 0:
            self.saves_s.append(time.time() - self.stood_at[-1])

    def regroup(self, why: str, before: View) -> View | None:
        """A member is gone, or somebody asks."""
        self._lost_at = self._lost_at or time.time()
        return super().regroup(why, before)

    def die(self) -> View | None:
        """What this rank waits for from here on is no restart of the others."""
        self._lost_at = 0.0
        return super().die()


def trained(group: dist.ProcessGroup, plan: Plan, folder: str) -> Told:
    """A whole run of one variant, on each rank of `group`."""
    given = {"RUN_MODE": "elastic", "WORLD_SIZE": str(group.size()), "LAB_STEPS": str(plan.steps), "LAB_LOSSES": "0"}
    config = Config.read(given | plan.settings | {"RANK": str(group.rank()), "MASTER_ADDR": "127.0.0.1"})
    lab = lab_of(group, config, plan.name)
    net = open_net(lab)
    (policy,) = [each for each in POLICIES if each.name == plan.variant]
    began_at = float(lab.exchange.share("the clock", time.time() if group.rank() == 0 else None))
    drill = ByTheClock(events(plan, group.size()), group.rank(), began_at)
    drill.num_members = lambda: len(net.membership.view.members)
    course = Clocked(
        net, policy, maker(lab), drill, saved=Path(folder, f"{plan.name}.rank{group.rank()}.pt"),
        saved_every=plan.saved_every, noted=lambda _step: None,
    )  # fmt: skip
    course.run()
    ended_at = time.time() if course.finished else began_at
    settle(lab, net)  # which ends the wait of those who are outside
    net.close()
    return Told(began_at, ended_at, drill.killed, step_s(course.stood_at), course.down_s, course.saves_s)


def events(plan: Plan, world_size: int) -> Iterator[FaultSpec]:
    """The events of all rates in the order of their seconds, the same on every rank."""
    rates = (arrivals(each, index, plan.seed, world_size) for index, each in enumerate(plan.faults))
    return heapq.merge(*rates, key=lambda each: each.at_s or 0.0)


def maker(lab: Lab) -> Callable[[Callable[[str], None]], Survivor]:
    """What makes a training of which no step is done."""

    def make(at: Callable[[str], None]) -> Survivor:
        batches = lab.batches(torch.float64, proof=True)
        return Survivor(lab.model(torch.float64), batches, lab.config, lab.rank, lab.config.steps, at)

    return make


def step_s(stood_at: Sequence[float]) -> float:
    """The median of the times between steps; 0 of a rank that applied none."""
    return median(after - before for before, after in pairwise(stood_at)) if stood_at[1:] else 0
