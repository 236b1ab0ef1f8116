"""The way of one rank through one variant: in, out, and in again, until all steps are done.

assemble -> in the view: make a group, take over what is missing, train
               a member is gone   leave the group, meet, go on in the next view
               somebody asks      after the step leave the group, meet, go on
               this rank dies     hang up, forget everything, come back to wait outside
            outside: ask, until a view has this rank in it, or the training is over
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
from distlab.lab.verify.silent_corruption import KINDS, LEAST, Corruption, Hashes, Odd
from distlab.techniques.elastic.process_group import Regroup
from distlab.techniques.elastic.strategy import Report, ShardedSurvivor, Survivor

from .network import BACK, Net

# What a variant does about a loss, as data: `Course` goes by it.

MEMBER, NOBODY = "member", "nobody"  # what a rank outside asks to be let in as


class Policy(NamedTuple):
    name: str
    restarts: bool = False  # all begin again from the last checkpoint
    returns: bool = False  # whoever died comes back and asks to be let in
    sharded: bool = False  # no member has another's part of the optimizer's state

    @property
    def wishes(self) -> set[str]:
        """Who is taken in, by what it asks as: in a variant in which ranks come back those of drills and real ones."""
        return {MEMBER, BACK} if self.returns or self.restarts else {MEMBER}

    @property
    def saves(self) -> bool:
        return self.restarts or self.sharded

    @property
    def wish(self) -> str:
        """What a rank that died comes back as."""
        return MEMBER if self.returns else NOBODY


# Silent corruption where ranks come and go: who is in at a step compares hashes, and the odd one is named.
#
# Every LAB_AUDIT_EVERY steps each member hashes the gradients once they are summed and the weights once they are
# updated, where all members hold them whole. One all_gather takes the hashes to all of them: any of them may be the
# last, so all know what was named. The first member says it. An audit that a loss ends is left out.

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
        """This member's "gradients" or "weights" of a step are there: hash them."""
        self.hash(kind, self.name, training, step)

    def gathered(self, name: str, mine: Hashes) -> Sequence[Hashes]:
        """A collective of all members; of a rank that is not in nothing."""
        assert self._group is not None, "who audits is in"
        labels = [f"{kind}.{parameter}" for kind in KINDS for parameter in self.holders[name]]
        rows = self._group.all_gather(torch.tensor([mine.get(label, NONE) for label in labels])).view(-1, len(labels))
        of_ranks = dict(zip(self._ranks, rows.tolist(), strict=True))
        return [
            {label: found for label, found in zip(labels, of_ranks.get(rank, ()), strict=False) if found != NONE}
            for rank in range(self.lab.world_size)
        ]

    def tell(self, name: str, step: int, odd: list[Odd], sentence: str) -> None:
        if self.lab.rank == self._ranks[0]:
            super().tell(name, step, odd, sentence)

    def decide(self) -> None:
        if self.audits[self.name]:
            self.decide_one(self.name)


# Losses on purpose: which rank dies, at which step, and where in it, all drawn by LAB_SEED.
#
# A rank that dies here closes its sockets without a word, as the kernel does for a process that is killed, and
# forgets all that it had: its peers cannot tell the difference. For real it is `docker kill`, or `python -m
# benchmarks.elastic`.
#
#     computed   it has its gradient, and gives it to nobody: the step is redone without it
#     torn       it dies in the all_reduce, and so late that some have the sum and one has not: the step is kept

COMPUTED, TORN = "computed", "torn"
BACK_AFTER = 2  # steps that the others go on without a rank that comes back


class Killed(Exception):
    """What a rank raises where it dies."""


class Torn(RuntimeError):
    """What gloo raises where the sum does not come."""


class Loss(NamedTuple):
    """Rank `rank` dies in `step`; where it is torn, `without` is the survivor that does not get the sum."""

    step: int
    rank: int
    moment: str
    without: int | None = None


def draw_losses(seed: int, ranks: list[int], steps: int, losses: int, *, comes_back: bool) -> list[Loss]:
    """Up to `losses` of them in a training of `steps` steps by `ranks`, in the order of steps.

    Somebody is always left: where nobody comes back, of N ranks N - 1 can be lost. After the last one there are steps
    enough for whoever comes back.
    """
    draw = random.Random(seed)
    there, made = list(ranks), list[Loss]()
    room = steps - 1 - BACK_AFTER
    for number in range(min(losses, max(0, room))):
        if len(there) < 2:
            break
        rank = draw.choice(there)
        left = [each for each in there if each != rank]
        torn = number % 2 == 0 and len(left) > 1
        step = 1 + number * room // losses
        made.append(Loss(step, rank, TORN if torn else COMPUTED, draw.choice(left) if torn else None))
        if not comes_back:
            there = left
    return made


class Drill:
    """The losses as one rank meets them: `at` is called between the parts of each step."""

    def __init__(self, losses: list[Loss], rank: int) -> None:
        self.losses, self.rank = losses, rank
        self._ahead = list(losses)

    def at(self, step: int, moment: str) -> None:
        """Raise `Killed` where this rank dies now, `Torn` where it is left without the sum; each once."""
        for loss in self._ahead:
            place = "computed" if loss.moment == COMPUTED else "summed"
            if loss.step == step and place == moment and self.rank in (loss.rank, loss.without):
                self._ahead.remove(loss)
                raise Killed if loss.rank == self.rank else Torn("the sum did not come")

    def waits_for(self, step: int) -> bool:
        """Whether at `step` the others wait for a rank that comes back, so that it shows however fast the steps are."""
        return any(loss.step + BACK_AFTER == step for loss in self.losses)


AWAY_S = 0.2  # from a death in a drill to the return
WAIT_S = 10.0  # for a rank that comes back, at most
EVENT_KINDS = {"reduced": "gradients", "applied": "weights"}  # what an audit compares when


class Event(NamedTuple):
    """A change of who is in, as one member saw it."""

    why: str
    began_at: float  # Unix time: it met with an error, or was asked
    met_at: float  # it had left, and began to agree
    agreed_at: float
    next_step_at: float  # the next step was applied
    before: list[int]
    after: list[int]
    applied_before: int  # steps, by this rank
    applied: int  # and what all go on from
    restored: bool  # from a checkpoint


class Course:
    """One rank in one variant; `make` gives a fresh training, which calls its argument between the parts of a step."""

    def __init__(
        self, net: Net, policy: Policy, make: Callable[[Callable[[str], None]], Survivor], drill: Drill, audit: Audit,
        *, saved: Path, saved_every: int, noted: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.net, self.policy, self.make, self.drill, self.audit = net, policy, make, drill, audit
        self.saved, self.saved_every, self.noted = saved, saved_every, noted
        self.computing = 0  # the number of the step that is under way
        self.training = self.fresh()
        self.record: list[list[Any]] = []  # [first step, members by rank], as the views have it
        self.events: list[Event] = []
        self.commits: list[tuple[float, int]] = []  # Unix time, steps applied
        self.lives = 1
        self.taken_back = 0  # updates that this rank had applied and that do not stand, in all of its lives
        self.computed = 0  # steps, those that were computed again included
        self.finished = False
        self.apart = 0.0  # how far this rank's state is from the first member's at the end
        self.moments: torch.Tensor | None = None

    def fresh(self) -> Survivor:
        def at(moment: str) -> None:
            self.computed += moment == COMPUTED
            if len(self.net.membership.view.members) > 1:  # the last one dies only if you kill it
                self.drill.at(self.training.applied, moment)
            if moment in EVENT_KINDS:
                self.audit.see(EVENT_KINDS[moment], training, self.computing)

        training = self.make(at)
        if isinstance(training, ShardedSurvivor):  # what a loss may lead back to, whatever an earlier life has saved
            training.save(self.saved, self.net.group)
        return training

    def run(self, view: View | None = None) -> None:
        """Take part until the training is over; with a `view`, which a process that has come back was let in to."""
        if view is None:
            view = self.net.membership.assemble(f"{BEGIN} {self.policy.name}", self.training.report(), self.first)
        else:
            self.lives += 1
        while view is not None:
            view = self.within(view)

    def within(self, view: View) -> View | None:
        """Be in `view`, or outside of it, until the next one; None at the end."""
        if self.net.membership.me not in view.members:
            return self.net.membership.ask({"as": self.policy.wish})
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
        """Step until somebody asks to be let in, or until the end."""
        membership, group = self.net.membership, self.net.group
        place, size = view.members.index(membership.me), len(view.members)
        while self.training.applied < self.training.steps:
            if place == 0:
                self.wait_for_returns()
            self.computing = self.training.applied
            self.noted(self.computing)
            asked = self.training.step(group, place, size, wish=place == 0 and bool(self.newcomers()))
            self.committed()
            self.audit.compare(self.policy.name, self.computing)
            if asked:
                return self.regroup("asked", view)
        self.moments = self.training.moments(group)
        mine = self.training.state()
        self.apart = float((group.broadcast(mine.clone(), 0) - mine).abs().max())
        group.sum(torch.zeros(1))  # whoever has come here knows that all have every step
        membership.finish()
        group.leave()
        self.finished = True
        return None

    def committed(self) -> None:
        """A step stands on this rank."""
        now = time.time()
        self.commits.append((now, self.training.applied))
        if self.events and not self.events[-1].next_step_at:
            self.events[-1] = self.events[-1]._replace(next_step_at=now)
        if self.policy.saves and self.training.applied % self.saved_every == 0:
            self.training.save(self.saved, self.net.group)

    # --- when who is in changes ---

    def regroup(self, why: str, before: View) -> View | None:
        """Leave the group and agree on who goes on, and from where."""
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
        self.taken_back += 0 if restored else max(0, applied - event.applied)
        return view

    def restart(self) -> View | None:
        """What a process that is started again does: nothing is left but what lies on the disk."""
        self.training = self.fresh()
        if self.saved.exists():
            self.training.load(self.saved)
        return self.net.membership.assemble(f"restart {self.policy.name}", self.training.report(), self.first)

    def die(self) -> View | None:
        """Hang up as a killed process does, and come back as another one that has nothing."""
        self.net.die()
        self.lives += 1
        self.training, self.events, self.commits, self.computed = self.fresh(), [], [], 0
        time.sleep(AWAY_S)
        if self.policy.restarts:
            return self.restart()
        return self.net.membership.ask({"as": self.policy.wish})

    def wait_for_returns(self) -> None:
        """In a drill: the first member waits until whoever comes back has asked."""
        membership, deadline = self.net.membership, time.monotonic() + WAIT_S
        if self.policy.returns and self.drill.waits_for(self.training.applied):
            while not self.newcomers() and len(membership.view.members) < len(membership.world):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)

    def newcomers(self) -> list[Member]:
        """Who asks, and is to be let in."""
        return [member for member, wish in self.net.membership.asking.items() if wish["as"] in self.policy.wishes]

    # --- what the first member decides ---

    def first(self, there: list[Member], reports: dict[Member, Report]) -> Report:
        """The view in which all begin, or begin again with whoever asks."""
        return self.planned(there, self.newcomers() if self.record else [], reports)

    def next(self, there: list[Member], reports: dict[Member, Report]) -> Report:
        """The view of those who are left, and of whom they let in."""
        members = [member for member in there if reports[member]]
        others = [member for member in there if member not in members]  # asked, and were let in by a view that fell
        return self.planned(members, [*others, *self.newcomers()], reports)

    def planned(self, members: list[Member], newcomers: list[Member], reports: dict[Member, Report]) -> Report:
        by_rank = {member.rank: reports[member] for member in members}
        plan = self.training.decide(by_rank, [member.rank for member in newcomers])
        ranks = [member.rank for member in (*members, *newcomers)]
        kept = [entry for entry in self.record if entry[0] < plan["applied"]]
        record = [*kept, [plan["applied"], ranks]]
        return plan | {"members": [*members, *newcomers], "record": record, "variant": self.policy.name}
