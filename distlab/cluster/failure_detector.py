"""Who is lost, and when a silence becomes a verdict: once every table shows the same break, and by the lowest survivor
first.

Who is lost is a pure function of who hears whom, so that every rank that sees the same comes to the same sentence. Lost
is the rank that is heard by fewest, in a tie the higher; a rank hears itself, and silent ranks do not vote. Ranks that
nobody hears are all lost. Where a cluster falls apart, the smaller side is the one that is cut off, on both sides'
word; two halves name each other. Nobody goes on after a verdict, so it need not be right about whose fault it was: it
has to be the same on every survivor, and to name both ends of a broken link.

A rank that fell silent is missing in its neighbours' tables at moments that differ by a stamp, a beat and a look. Who
judged at once might name one rank where two were lost, or another rank than its neighbour does. So a break has to stand
for SETTLE_S; then the lowest of those who agree speaks, and the others leave it FOLLOW_S to be heard, to repeat its
words. Between ranks that live a link is broken only if each of them has beaten since the break was seen: a watch that
is late by a second hears a rank that was killed for a second longer than its neighbours do.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from distlab.cluster import name_ranks
from distlab.cluster.heartbeat import Hearing, LastReport, RunPosition, Verdict
from distlab.cluster.heartbeat_helper import hops_of
from distlab.report.records import Lost

OOM_SHARE = 0.85  # a container that was killed for memory had at least this share in its last heartbeat
# A stamp, a beat and a look, a period each: then every table shows the same break; so much a hop of news. Of two deaths
# 0.1 s apart all of 8 tables showed the same after 0.78 s at most, of 33 after 0.97, of 64 after 1.75.
SETTLE_S = 0.75
FOLLOW_S = 0.5  # how long the others leave the word to the lowest survivor


def lost_ranks(hears: Mapping[int, Set[int]], present: Set[int]) -> frozenset[int]:
    """The lost among `present`, from what each voter hears; empty where every rank votes and is heard by all."""
    voters = set(hears)
    heard_by = {rank: sum(rank in hears[voter] or rank == voter for voter in voters) for rank in present}
    if voters == present and min(heard_by.values(), default=0) == len(voters):
        return frozenset()
    if 2 * len(voters) < len(present):
        return frozenset(voters)
    silent = {rank for rank, count in heard_by.items() if count == 0}
    if silent:
        return frozenset(silent)
    fewest = min(heard_by.values())
    return frozenset({max(rank for rank, count in heard_by.items() if count == fewest)})


def diagnose(hears: Mapping[int, Set[int]], present: Set[int], seen: Mapping[int, LastReport]) -> Verdict | None:
    """The verdict on `lost_ranks`, or None; `seen` has the last words of every rank.

    A death that the kernel has told of is no matter of votes: one survivor of many is not the one that is cut off.
    """
    killed = frozenset(rank for rank in present if seen[rank].killed)
    lost = killed or lost_ranks(hears, present)
    if not lost:
        return None
    reasons = {rank: _reason(rank, lost, hears, present, seen) for rank in sorted(lost)}
    kind = "is partitioned from the cluster" if lost == set(hears) else "lost"
    sentence = "; ".join(f"rank {rank} {kind} {seen[rank].place}: {reason}" for rank, reason in reasons.items())
    return Verdict(3, sentence, tuple(Lost(rank, seen[rank].step, reason) for rank, reason in reasons.items()))


def _reason(
    rank: int, lost: frozenset[int], hears: Mapping[int, Set[int]], present: Set[int], seen: Mapping[int, LastReport]
) -> str:
    if seen[rank].killed:
        return "killed by the OOM killer: its container's limit is LAB_MEMORY"
    if lost == set(hears):  # this side is the smaller one
        others = present - lost
        return f"no heartbeat from {name_ranks(others)} for {max(seen[other].silent_s for other in others):.1f} s"
    if rank not in hears:
        reason = f"no heartbeat for {seen[rank].silent_s:.1f} s"
        share = seen[rank].memory_share
        if share is not None and share >= OOM_SHARE:
            reason += f", with memory at {share:.0%} of its limit in the last one: probably killed by the OOM killer"
        return reason
    deaf = {other for other in hears if rank not in hears[other] or other not in hears[rank]} - {rank}
    return (
        f"{name_ranks(deaf)} and rank {rank} lost heartbeats from each other, though both are alive: the link between"
        " them is broken"
    )


class FailureDetector:
    """What one rank makes of what it hears."""

    def __init__(self, rank: int, hearing: Hearing) -> None:
        self.rank, self.hearing = rank, hearing
        self.settle_s = SETTLE_S * hops_of(len(hearing.peers))
        self._broken_at: float | None = None
        self._counts: dict[int, int] = {}  # of each rank's heartbeats, when the break was seen

    def verdict(self, place: RunPosition, now: float) -> Verdict | None:
        """Who is lost, if that has stood for long enough; None while the cluster is whole, or for a moment more."""
        hears = self.hearing.hears(now)
        found = diagnose(hears, self.hearing.present(), self.hearing.seen(place, now))
        if found is None:
            self._broken_at = None
            return None
        if self._broken_at is None:
            self._broken_at = now
            self._counts = self.hearing.counts()
        lost = {entry.rank for entry in found.lost}
        if lost & set(hears) and not self._alive(hears):
            return None
        speaker = min(set(hears) - lost or set(hears))
        patience_s = self.settle_s + (0.0 if speaker == self.rank else FOLLOW_S)
        return found if now - self._broken_at >= patience_s else None

    def _alive(self, voters: Iterable[int]) -> bool:
        """Whether each other rank of `voters` has beaten since the break was seen."""
        counts = self.hearing.counts()
        return all(counts[rank] > self._counts.get(rank, 0) for rank in voters if rank != self.rank)

    def settled(self) -> None:
        """What was found has been acted on, and those who are left go on."""
        self._broken_at = None


# For whom a rank waits: said once it has begun nothing for a while, since only then are others' words newer than its
# own.
#
# A wait that is expected is not said: not for a rank that computes on purpose what the others wait for, and not one
# of a length that is normal in this run. On cores that ranks share everything takes long, this rank's own work too:
# what it takes itself, another may take twice.

SLOW_S, SLOW_AGAIN_S = 3.0, 5.0
NORMAL = 2.0  # times this rank's own longest work
# Phases, by their first words, in which these ranks compute on purpose what all others wait for: rank 0 the one process
# or the report, rank 1 the twin of the one process. Rank 0's own log says how far it is.
ALONE, COMPUTING = ("one process", "report"), (0, 1)


class Slowness:
    """Where this rank was last seen, how long it worked in one place at most, and when it last said for whom it
    waits."""

    def __init__(self, now: float) -> None:
        self._place, self._since = RunPosition(), now
        self._waited = False  # for another, when it was last looked at there
        self._longest_s = 0.0
        self._said_at = 0.0

    def sentence(self, hearing: Hearing, place: RunPosition, now: float) -> str:
        """Whom this rank waits for, if it is time to say so; else empty. `place` has the collectives begun there."""
        if (place.turn, place.calls) != (self._place.turn, self._place.calls):
            self._note_work(now)
            self._place, self._since = place, now
        waited_for = hearing.waited_for(place)
        self._waited = bool(waited_for)
        waits_s = now - self._since
        if waits_s < max(SLOW_S, NORMAL * self._longest_s) or now - self._said_at < SLOW_AGAIN_S:
            return ""
        alone = [rank for rank in COMPUTING if rank in waited_for and waited_for[rank].seen.phase.startswith(ALONE)]
        behind = hearing.behind(place, now, but=alone)
        if not behind:
            return ""
        self._said_at = now
        return f"waiting for {waits_s:.1f} s at step {place.step} in {place.phase} for {', '.join(behind)}"

    def _note_work(self, now: float) -> None:
        """It leaves its place: what it did there was work of its own, if it waited for nobody and had begun."""
        if not self._waited and self._place.turn > 0 and not self._place.phase.startswith(ALONE):
            self._longest_s = max(self._longest_s, now - self._since)


# Where the main thread of a rank is: at which step, in which phase, and how many collectives it has begun there.
#
# The watch's thread tells it to the others with each beat, so that a loss is named with the place it happened at, and
# of ranks that wait for each other the one that is behind can be found.

if TYPE_CHECKING:
    import torch.distributed as dist


class MainThreadProgress:
    """Written by the main thread, read by the watch's.

    `work` is the step and phase with waits for other ranks left out; `together` is whether all ranks change place
    together, so that who has done so less often is behind: not once ranks may leave, when each goes at its own pace.
    """

    def __init__(self) -> None:
        self.place = RunPosition(since=time.monotonic())
        self.work = self.place.step, self.place.phase
        self.together = True
        self._calls_begun: Callable[[], int] = lambda: 0

    def follow(self, group: "dist.ProcessGroup") -> None:
        """From now on count the collectives that this rank begins in `group`: gloo and NCCL number them."""
        self._calls_begun = group._get_sequence_number_for_group  # type: ignore[attr-defined]

    def at(self, step: int, phase: str) -> None:
        """Note where the main thread is."""
        self.work = step, phase
        self._move(step, phase)

    def part(self) -> None:
        """From now on each rank goes at its own pace: who has changed place how often says nothing."""
        self.together, self.place = False, replace(self.place, turn=0)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a wait for the other ranks, outside of any collective."""
        before = self.place
        self._move(before.step, f"the wait at {what}")
        yield
        self._move(before.step, before.phase)

    def here(self) -> RunPosition:
        """Where it is, with the collectives that it began there."""
        place = self.place
        return replace(place, calls=self._calls_begun() - place.calls)

    def _move(self, step: int, phase: str) -> None:
        self.place = RunPosition(self.place.turn + self.together, step, phase, time.monotonic(), self._calls_begun())
