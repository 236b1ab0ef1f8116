"""Ranks that others wait for and that make no call: at work or asleep they are no hang, and are named every 10 s.

A rank that had no processor time at all for LAB_COLLECTIVE_TIMEOUT_S while others waited for it stands in something
that is no call (a queue, a lock, a file): that is told as what it is, so that nothing waits for ever.
"""

from collections.abc import Callable, Sequence

from workers.check.casebook import IDLE_SHARE, Case
from workers.check.finding import HANG, Finding
from workers.check.matching import Matching
from workers.check.waiting import hung, standing_at, standings, table
from workers.cluster import name_ranks

SAY_S = 10.0
AT_WORK = 0.5  # of a core


class Still:
    """Looks again and again; `bound_s` is for how long a rank may stand still while others wait for it."""

    def __init__(self, bound_s: float, say: Callable[[str], None]) -> None:
        self._bound_s, self._say = bound_s, say
        self._said_at: float | None = None
        self._idle_since: dict[int, float] = {}

    def _all_asleep(self, cases: Sequence[Case], now: float) -> Finding | None:
        """Ranks that neither call nor compute, with nobody left who does."""
        left = [case for case in cases if not case.over]
        if not left or any(case.cpu_share > IDLE_SHARE or now - case.moved_at < self._bound_s for case in left):
            return None
        s = "s" if len(left) == 1 else ""
        sentence = (
            f"{name_ranks(case.rank for case in left)} stand{s} still at {standing_at(left[0])} for"
            f" {self._bound_s:g} s, and no other rank is at work"
        )
        return Finding(HANG, sentence, tuple(case.rank for case in left), table(cases, {}), ends=True)

    def look(self, cases: Sequence[Case], matching: Matching, now: float) -> Finding | None:
        """Say who computes, if it is time to; a finding where one has stood still for too long."""
        waits = standings(cases, matching)
        if (asleep := self._all_asleep(cases, now)) is not None:
            return asleep
        needed = {rank for each in waits.values() for rank in each.needs if not each.any_of}
        alone = [case for case in cases if case.rank in needed and case.rank not in waits and not case.over]
        idle = {case.rank for case in alone if case.cpu_share < IDLE_SHARE}
        self._idle_since = {rank: self._idle_since.get(rank, now) for rank in idle}
        if not alone or hung(waits, {case.rank for case in cases if case.over}):
            self._said_at = None
            return None
        if self._said_at is None:
            self._said_at = now
        waiting = sorted(rank for rank, each in waits.items() if each.needs & {case.rank for case in alone})
        wait = waits[waiting[0]].wait
        s = "s" if len(waiting) == 1 else ""
        who = f"{name_ranks(waiting)} wait{s} for it in {wait.what} at {wait.place}"
        late = [rank for rank, since in self._idle_since.items() if now - since > self._bound_s]
        if late:
            sentence = (
                f"rank {late[0]} has stood still at {standing_at(cases[late[0]])} for {self._bound_s:g} s, and {who}"
            )
            return Finding(HANG, sentence, tuple(late), table(cases, waits), ends=True)
        if now - self._said_at >= SAY_S:
            self._said_at = now
            for case in alone:
                doing = "computes" if case.cpu_share > AT_WORK else "stands"
                self._say(
                    f"no hang    rank {case.rank} {doing} at {standing_at(case)} ({case.cpu_share:.0%} of a core), and"
                    f" {who} for {now - wait.since_s:.0f} s"
                )
        return None
