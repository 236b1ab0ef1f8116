"""One rank's course through one variant: joining, leaving and rejoining, until all steps are done.

assemble -> in the view: form a group, copy missing state, train
               a member is lost   leave the group, meet, continue in the next view
               a rank asks        after the step leave the group, meet, continue
               this rank dies     disconnect, drop all state, return and wait outside
            outside: ask, until a view has this rank, or the training is over
"""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distlab.lab.cluster.membership import Member, View
from distlab.lab.cluster.views import BEGIN
from distlab.lab.lab import Lab
from distlab.lab.verify.silent_corruption import KINDS, LEAST, Corruption, Differing, Hashes
from distlab.techniques.elastic.process_group import Regroup
from distlab.techniques.elastic.strategy import Report, ShardedSurvivor, Survivor

from .network import BACK, Net

# How a variant reacts to a loss, as data for `Course`.

MEMBER, NOBODY = "member", "nobody"  # a rank's request to join


class Policy(NamedTuple):
    name: str
    restarts: bool = False  # all restart from the last checkpoint
    returns: bool = False  # a dead rank returns and asks to join
    sharded: bool = False  # members do not have each other's parts of the optimizer's state

    @property
    def accepted(self) -> set[str]:
        """Return the join requests that are accepted: those of restarted processes only where ranks return."""
        return {MEMBER, BACK} if self.returns or self.restarts else {MEMBER}

    @property
    def saves(self) -> bool:
        return self.restarts or self.sharded

    @property
    def request(self) -> str:
        """Return the request of a dead rank that has returned."""
        return MEMBER if self.returns else NOBODY


# Silent corruption with changing members: the members of a step compare hashes, and the outlier is named.
#
# Every LAB_AUDIT_EVERY steps each member hashes the summed gradients and the updated weights, if all members have them
# complete. An all_gather sends the hashes to all members, because any of them may be the last survivor. The first one
# logs the result. An audit interrupted by a loss is skipped.

NONE = -1  # in place of a hash, which is never negative


class Audit(Corruption):
    def __init__(self, lab: Lab, name: str) -> None:
        super().__init__(lab, {}, lab.config.audit_every)
        self.name = name
        self._group: Regroup | None = None
        self._ranks: list[int] = []

    def enter(self, group: Regroup, ranks: Sequence[int], training: Survivor) -> None:
        self._group, self._ranks = group, list(ranks)
        compared = training.alike("weights") if len(ranks) >= LEAST else []
        self.holders[self.name] = {parameter: sorted(ranks) for parameter, _ in compared}

    def see(self, kind: str, training: Survivor, step: int) -> None:
        """Hash this member's "gradients" or "weights" of a step."""
        self.hash(kind, self.name, training, step)

    def gathered(self, name: str, mine: Hashes) -> Sequence[Hashes]:
        """Return all members' hashes, none for ranks that are no members; a collective."""
        assert self._group is not None, "an auditing rank is a member"
        labels = [f"{kind}.{parameter}" for kind in KINDS for parameter in self.holders[name]]
        rows = self._group.all_gather(torch.tensor([mine.get(label, NONE) for label in labels])).view(-1, len(labels))
        of_ranks = dict(zip(self._ranks, rows.tolist(), strict=True))
        return [
            {label: found for label, found in zip(labels, of_ranks.get(rank, ()), strict=False) if found != NONE}
            for rank in range(self.lab.world_size)
        ]

    def report(self, name: str, step: int, differing: list[Differing], sentence: str) -> None:
        if self.lab.rank == self._ranks[0]:
            super().report(name, step, differing, sentence)

    def decide(self) -> None:
        if self.audits[self.name]:
            self.decide_one(self.name)


# Injected losses: which rank dies, at which step and where in it, all drawn by LAB_SEED.
#
# A rank that dies here closes its sockets without a message, as the kernel does for a killed process, and drops all
# state: its peers cannot tell the difference. For real deaths use `docker kill`, or `python -m benchmarks.elastic`.
#
#     computed   it has its gradient but has not sent it: the step is redone without it
#     torn       it dies late in the all_reduce: some have the sum and one does not, so the step is kept

COMPUTED, TORN = "computed", "torn"
BACK_AFTER = 2  # steps without a rank before it returns


class Killed(Exception):
    """Raised by a rank where it dies."""


class Torn(RuntimeError):
    """Raised in place of gloo's error if the sum does not arrive."""


class Loss(NamedTuple):
    """Rank `rank` dies in `step`; if torn, the survivor `without` does not get the sum."""

    step: int
    rank: int
    moment: str
    without: int | None = None


def draw_losses(seed: int, ranks: list[int], steps: int, losses: int, *, returns: bool) -> list[Loss]:
    """Return up to `losses` of them in a training of `steps` steps by `ranks`, in step order.

    One rank always survives: if none returns, at most N - 1 of N are lost. After the last loss there are enough
    steps for a rank to return.
    """
    draw = random.Random(seed)
    present, drawn = list(ranks), list[Loss]()
    room = steps - 1 - BACK_AFTER
    for number in range(min(losses, max(0, room))):
        if len(present) < 2:
            break
        rank = draw.choice(present)
        remaining = [each for each in present if each != rank]
        torn = number % 2 == 0 and len(remaining) > 1
        step = 1 + number * room // losses
        drawn.append(Loss(step, rank, TORN if torn else COMPUTED, draw.choice(remaining) if torn else None))
        if not returns:
            present = remaining
    return drawn


class LossPlan:
    """The losses that one rank has to perform: `at` is called between the parts of each step."""

    def __init__(self, losses: list[Loss], rank: int) -> None:
        self.losses, self.rank = losses, rank
        self._ahead = list(losses)

    def at(self, step: int, moment: str) -> None:
        """Raise `Killed` if this rank dies now, `Torn` if it misses the sum; each once."""
        for loss in self._ahead:
            place = "computed" if loss.moment == COMPUTED else "summed"
            if loss.step == step and place == moment and self.rank in (loss.rank, loss.without):
                self._ahead.remove(loss)
                raise Killed if loss.rank == self.rank else Torn("the sum did not arrive")

    def waits_for(self, step: int) -> bool:
        """Return whether the others wait at `step` for a returning rank, so that it rejoins even if steps are fast."""
        return any(loss.step + BACK_AFTER == step for loss in self.losses)


AWAY_S = 0.2  # from an injected death to the return
WAIT_S = 10.0  # for a returning rank, at most
EVENT_KINDS = {"reduced": "gradients", "applied": "weights"}  # what an audit compares, and when


class Event(NamedTuple):
    """A change of members, as one member recorded it."""

    why: str
    began_at: float  # Unix time: the error, or the request
    met_at: float  # it had left the group, and began to agree
    agreed_at: float
    next_step_at: float  # the next step was applied
    before: list[int]
    after: list[int]
    applied_before: int  # steps, by this rank
    applied: int  # from which all continue
    restored: bool  # from a checkpoint


class Course:
    """One rank in one variant; `make` returns a fresh training that calls its argument between the parts of a step."""

    def __init__(
        self, net: Net, policy: Policy, make: Callable[[Callable[[str], None]], Survivor], loss_plan: LossPlan,
        audit: Audit, *, saved: Path, saved_every: int, on_step: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.net, self.policy, self.make, self.loss_plan, self.audit = net, policy, make, loss_plan, audit
        self.saved, self.saved_every, self.on_step = saved, saved_every, on_step
        self.computing = 0  # the number of the step that is under way
        self.training = self.fresh()
        self.record: list[list[Any]] = []  # [first step, members by rank], as the views have it
        self.events: list[Event] = []
        self.commits: list[tuple[float, int]] = []  # Unix time, steps applied
        self.lives = 1
        self.undone = 0  # updates applied on this rank that are not valid, in all its lives
        self.computed = 0  # steps, including repeated ones
        self.finished = False
        self.deviation = 0.0  # largest difference of this rank's state from the first member's at the end
        self.moments: torch.Tensor | None = None

    def fresh(self) -> Survivor:
        def at(moment: str) -> None:
            self.computed += moment == COMPUTED
            if len(self.net.membership.view.members) > 1:  # the last member is never killed here
                self.loss_plan.at(self.training.applied, moment)
            if moment in EVENT_KINDS:
                self.audit.see(EVENT_KINDS[moment], training, self.computing)

        training = self.make(at)
        if isinstance(training, ShardedSurvivor):  # a loss may return to this, whatever an earlier life saved
            training.save(self.saved, self.net.group)
        return training

    def run(self, view: View | None = None) -> None:
        """Take part until the training is over; `view` is the one that a returned process joined."""
        if view is None:
            view = self.net.membership.assemble(f"{BEGIN} {self.policy.name}", self.training.report(), self.first)
        else:
            self.lives += 1
        while view is not None:
            view = self.within(view)

    def within(self, view: View) -> View | None:
        """Train in `view`, or wait outside, until the next one; None at the end."""
        if self.net.membership.me not in view.members:
            return self.net.membership.ask({"as": self.policy.request})
        try:
            self.enter(view)
            return self.train(view)
        except Killed:
            return self.die()
        except RuntimeError as error:
            why = str(error)
        return self.regroup(f"lost: {why}", view)

    def enter(self, view: View) -> None:
        self.record = view.plan["record"]
        self.net.form(view)
        self.training.enter(self.net.group, view.ranks, view.plan)
        self.audit.enter(self.net.group, view.ranks, self.training)

    def train(self, view: View) -> View | None:
        """Train until a rank asks to join, or until the end."""
        membership, group = self.net.membership, self.net.group
        place, size = view.members.index(membership.me), len(view.members)
        while self.training.applied < self.training.steps:
            if place == 0:
                self.wait_for_returns()
            self.computing = self.training.applied
            self.on_step(self.computing)
            requested = self.training.step(group, place, size, join_request=place == 0 and bool(self.newcomers()))
            self.committed()
            self.audit.compare(self.policy.name, self.computing)
            if requested:
                return self.regroup("asked", view)
        self.moments = self.training.moments(group)
        mine = self.training.state()
        self.deviation = float((group.broadcast(mine.clone(), 0) - mine).abs().max())
        group.sum(torch.zeros(1))  # now every member knows that all have every step
        membership.finish()
        group.leave()
        self.finished = True
        return None

    def committed(self) -> None:
        """Record that a step is valid on this rank."""
        now = time.time()
        self.commits.append((now, self.training.applied))
        if self.events and not self.events[-1].next_step_at:
            self.events[-1] = self.events[-1]._replace(next_step_at=now)
        if self.policy.saves and self.training.applied % self.saved_every == 0:
            self.training.save(self.saved, self.net.group)

    # --- when the members change ---

    def regroup(self, why: str, before: View) -> View | None:
        """Leave the group and agree on the members and on the state to continue from."""
        began_at, applied = time.time(), self.training.applied
        self.net.group.leave()
        membership, met_at = self.net.membership, time.time()
        view = self.restart() if self.policy.restarts else membership.meet(self.training.report(), self.next)
        if view is None:
            self.finished = True
            return None
        restored = self.policy.restarts or bool(view.plan.get("restored"))
        event = Event(
            why, began_at, met_at, time.time(), 0.0, list(before.ranks), list(view.ranks), applied,
            view.plan["applied"], restored,
        )  # fmt: skip
        self.events.append(event)
        self.undone += 0 if restored else max(0, applied - event.applied)
        return view

    def restart(self) -> View | None:
        """Act as a restarted process: keep only what is on disk."""
        self.training = self.fresh()
        if self.saved.exists():
            self.training.load(self.saved)
        return self.net.membership.assemble(f"restart {self.policy.name}", self.training.report(), self.first)

    def die(self) -> View | None:
        """Disconnect like a killed process, and return as an empty one."""
        self.net.die()
        self.lives += 1
        self.training, self.events, self.commits, self.computed = self.fresh(), [], [], 0
        time.sleep(AWAY_S)
        if self.policy.restarts:
            return self.restart()
        return self.net.membership.ask({"as": self.policy.request})

    def wait_for_returns(self) -> None:
        """In a fault test, let the first member wait until the returning rank has asked to join."""
        membership, deadline = self.net.membership, time.monotonic() + WAIT_S
        if self.policy.returns and self.loss_plan.waits_for(self.training.applied):
            while not self.newcomers() and len(membership.view.members) < len(membership.world):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)

    def newcomers(self) -> list[Member]:
        """Return the members that ask to join and may."""
        return [each for each, request in self.net.membership.requests.items() if request["as"] in self.policy.accepted]

    # --- decisions of the first member ---

    def first(self, present: list[Member], reports: dict[Member, Report]) -> Report:
        """Return the view in which all begin, or restart together with those who ask."""
        return self.planned(present, self.newcomers() if self.record else [], reports)

    def next(self, present: list[Member], reports: dict[Member, Report]) -> Report:
        """Return the view of the survivors and the newcomers that they accept."""
        members = [member for member in present if reports[member]]
        others = [member for member in present if member not in members]  # accepted by a view that failed
        return self.planned(members, [*others, *self.newcomers()], reports)

    def planned(self, members: list[Member], newcomers: list[Member], reports: dict[Member, Report]) -> Report:
        by_rank = {member.rank: reports[member] for member in members}
        plan = self.training.decide(by_rank, [member.rank for member in newcomers])
        ranks = [member.rank for member in (*members, *newcomers)]
        kept = [entry for entry in self.record if entry[0] < plan["applied"]]
        record = [*kept, [plan["applied"], ranks]]
        return plan | {"members": [*members, *newcomers], "record": record, "variant": self.policy.name}
