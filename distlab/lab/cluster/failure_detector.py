"""Decide which ranks are lost: a pure function of connections and time.

A connection that ends without a message is a death, which the kernel reports at once. A rank that is silent for
LAB_LOST_AFTER_S is declared dead: its machine has failed, or it was stopped. All losses within SETTLE_S are named
together, so that one sentence covers a machine with two ranks.
"""

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from distlab.lab.cluster import name_ranks
from distlab.lab.cluster.messages import Place, Verdict
from distlab.lab.report.records import Lost

if TYPE_CHECKING:
    import torch.distributed as dist

SETTLE_S = 0.5
OOM_SHARE = 0.85  # a container that was killed for memory had at least this share in its last heartbeat


@dataclass
class RankState:
    """The state of one rank, as far as the server knows it."""

    last_heartbeat_at: float
    place: Place = field(default_factory=Place)
    ended_at: float | None = None  # its connection has ended
    how: str = ""  # how its process ended, if known
    left: bool = False  # it ended normally


def lost_ranks(ranks: Mapping[int, RankState], lost_after_s: float, now: float) -> dict[int, str]:
    """Return the ranks that are lost `now`, each with the reason."""
    found = {}
    for rank, state in sorted(ranks.items()):
        if state.left:
            continue
        if state.ended_at is not None:
            found[rank] = state.how or f"its connection ended{killed_for_memory(state.place)}"
        elif now - state.last_heartbeat_at > lost_after_s:
            found[rank] = f"no heartbeat for {lost_after_s:g} s{killed_for_memory(state.place)}"
    return found


def killed_for_memory(place: Place) -> str:
    """Return what a rank's last heartbeat reports about its memory."""
    if place.memory is None or place.memory < OOM_SHARE:
        return ""
    return f", with memory at {place.memory:.0%} of its limit in the last heartbeat: probably killed by the OOM killer"


def verdict_on(lost: Mapping[int, str], ranks: Mapping[int, RankState], host: int | None = None) -> Verdict:
    """Return the sentence about lost ranks for all others; `host` is the rank whose process judges.

    If all of several others are silent, and no connection has ended, the host itself is partitioned.
    """
    others = [rank for rank in ranks if rank != host and not ranks[rank].left]
    all_silent = len(others) > 1 and all(rank in lost and ranks[rank].ended_at is None for rank in others)
    if host is not None and host in ranks and all_silent:
        reason = f"no heartbeat from {name_ranks(others)}"
        sentence = f"rank {host} is partitioned from the cluster {ranks[host].place}: {reason}"
        return Verdict(3, sentence, (Lost(host, ranks[host].place.step, reason),))
    sentence = "; ".join(f"rank {rank} lost {ranks[rank].place}: {reason}" for rank, reason in lost.items())
    return Verdict(3, sentence, tuple(Lost(rank, ranks[rank].place.step, reason) for rank, reason in lost.items()))


class FailureDetector:
    """The ranks of a run as the server in the process of rank `host` knows them."""

    def __init__(self, host: int, ranks: Iterable[int], lost_after_s: float, now: float) -> None:
        self.host = host
        self.ranks = {rank: RankState(last_heartbeat_at=now) for rank in ranks}
        self.lost_after_s = lost_after_s
        self._lost_at: float | None = None  # the first of the losses that are named together

    def verdict(self, now: float) -> Verdict | None:
        """Return the verdict on all lost ranks, once the first has been lost for SETTLE_S."""
        lost = lost_ranks(self.ranks, self.lost_after_s, now)
        if not lost:
            self._lost_at = None
            return None
        self._lost_at = now if self._lost_at is None else self._lost_at
        return verdict_on(lost, self.ranks, self.host) if now - self._lost_at >= SETTLE_S else None

    def add(self, rank: int, now: float) -> None:
        """Record that a rank has joined, or joined again."""
        self.ranks[rank] = RankState(last_heartbeat_at=now)

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget these ranks: the run continues without them."""
        for rank in ranks:
            self.ranks.pop(rank, None)
        self._lost_at = None

    def restart_timeouts(self, now: float) -> None:
        """Ignore all silence until now, because this process itself did not run."""
        for state in self.ranks.values():
            state.last_heartbeat_at = now


# For which ranks a rank waits. It reports this only after it has waited for a while: by then it has newer heartbeats of
# the others.
#
# It does not report expected waits: for a rank that computes by design what the others wait for, or no longer than is
# normal in this run. If ranks share cores all work is slow, so another rank may take twice as long as this one.

SLOW_S, SLOW_AGAIN_S = 3.0, 5.0
NORMAL = 2.0  # times the longest work of this rank: a longer wait is reported
# Phases, by their first words, in which these ranks compute by design what all others wait for: rank 0 the reference or
# the report, rank 1 a second reference. Rank 0's own log shows its progress.
SERIAL_PHASES, SERIAL_RANKS = ("one process", "report"), (0, 1)


def waited_for(place: Place, others: Mapping[int, Place]) -> dict[int, Place]:
    """Return the other ranks that have changed place, or begun collectives in this place, less often."""
    return {rank: each for rank, each in sorted(others.items()) if (each.turn, each.calls) < (place.turn, place.calls)}


def behind(place: Place, others: Mapping[int, Place], skip: Container[int] = ()) -> list[str]:
    """Return the same ranks, each with its place, except those to `skip`."""
    late = waited_for(place, others)
    return [f"rank {rank} ({each} for {each.in_phase_s:.1f} s)" for rank, each in late.items() if rank not in skip]


class Slowness:
    """The last seen place of this rank, its longest work in one place, and when it last reported a wait."""

    def __init__(self, now: float) -> None:
        self._place, self._since = Place(), now
        self._waited = False  # for another rank, at the last look there
        self._longest_s = 0.0
        self._reported_at = 0.0

    def sentence(self, place: Place, others: Mapping[int, Place], now: float) -> str:
        """Return for which ranks this one waits, if it is time to report it; else empty."""
        if (place.turn, place.calls) != (self._place.turn, self._place.calls):
            self._note_work(now)
            self._place, self._since = place, now
        late = waited_for(place, others)
        self._waited = bool(late)
        waits_s = now - self._since
        if waits_s < max(SLOW_S, NORMAL * self._longest_s) or now - self._reported_at < SLOW_AGAIN_S:
            return ""
        serial = [rank for rank in SERIAL_RANKS if rank in late and late[rank].phase.startswith(SERIAL_PHASES)]
        named = behind(place, others, skip=serial)
        if not named:
            return ""
        self._reported_at = now
        return f"waiting for {waits_s:.1f} s {place} for {', '.join(named)}"

    def _note_work(self, now: float) -> None:
        """Record the time in the place that it leaves as its own work, if it waited for no rank there."""
        if not self._waited and self._place.turn > 0 and not self._place.phase.startswith(SERIAL_PHASES):
            self._longest_s = max(self._longest_s, now - self._since)


# Where the main thread of a rank is: its step, its phase, and how many collectives it has begun there. Heartbeats send
# this to the others, so that a loss is named with its place, and the rank that is behind is found.


class MainThreadProgress:
    """The progress of the main thread, which writes it; the watch's thread reads it.

    `work` is the step and phase without waits for other ranks. While `together` is set all ranks change place together,
    so one with fewer changes is behind; once ranks may leave, each has its own pace.
    """

    def __init__(self) -> None:
        self.place, self._since = Place(), time.monotonic()
        self.work = self.place.step, self.place.phase
        self.together = True
        self._calls_before = 0
        self._calls_begun: Callable[[], int] = lambda: 0

    def follow(self, group: "dist.ProcessGroup") -> None:
        """Count the collectives that this rank begins in `group` from now on: gloo and NCCL number them."""
        self._calls_begun = group._get_sequence_number_for_group  # type: ignore[attr-defined]

    def at(self, step: int, phase: str) -> None:
        """Record where the main thread is."""
        self.work = step, phase
        self._move(step, phase)

    def use_own_pace(self) -> None:
        """Let each rank have its own pace from now on: the number of changes of place no longer shows who is behind."""
        self.together, self.place = False, replace(self.place, turn=0)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark a wait for the other ranks, outside of any collective."""
        before = self.place
        self._move(before.step, f"the wait at {what}")
        yield
        self._move(before.step, before.phase)

    def here(self) -> Place:
        """Return the main thread's place, with the collectives that it began there."""
        calls, in_phase_s = self._calls_begun() - self._calls_before, time.monotonic() - self._since
        return replace(self.place, calls=calls, in_phase_s=round(in_phase_s, 2))

    def _move(self, step: int, phase: str) -> None:
        self._calls_before, self._since = self._calls_begun(), time.monotonic()
        self.place = Place(step, phase, self.place.turn + self.together)
