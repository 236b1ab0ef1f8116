"""Which ranks are lost: a pure function of connections and time.

A connection that ends without a word is a death, which the kernel tells at once. A rank that is silent for
LAB_LOST_AFTER_S is declared dead: its machine is gone, or it was stopped. All that are lost within SETTLE_S are named
together, so that one sentence tells of a machine with two ranks.
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
    """What is known of one rank."""

    heard_at: float
    place: Place = field(default_factory=Place)
    ended_at: float | None = None  # its connection has ended
    how: str = ""  # how its process ended, where that is known
    left: bool = False  # it had come to its end


def lost_ranks(ranks: Mapping[int, RankState], lost_after_s: float, now: float) -> dict[int, str]:
    """The ranks that are lost `now`, each with the reason."""
    found = {}
    for rank, state in sorted(ranks.items()):
        if state.left:
            continue
        if state.ended_at is not None:
            found[rank] = state.how or f"its connection ended{killed_for_memory(state.place)}"
        elif now - state.heard_at > lost_after_s:
            found[rank] = f"no heartbeat for {lost_after_s:g} s{killed_for_memory(state.place)}"
    return found


def killed_for_memory(place: Place) -> str:
    """What a rank's last heartbeat says of its memory."""
    if place.memory is None or place.memory < OOM_SHARE:
        return ""
    return f", with memory at {place.memory:.0%} of its limit in the last heartbeat: probably killed by the OOM killer"


def verdict_on(lost: Mapping[int, str], ranks: Mapping[int, RankState], host: int | None = None) -> Verdict:
    """The sentence about lost ranks that all others say; `host` is the rank whose process judges.

    Where it hears nobody any more, though no connection of several has ended, it is the one that is cut off.
    """
    others = [rank for rank in ranks if rank != host and not ranks[rank].left]
    deaf = len(others) > 1 and all(rank in lost and ranks[rank].ended_at is None for rank in others)
    if host is not None and host in ranks and deaf:
        reason = f"no heartbeat from {name_ranks(others)}"
        sentence = f"rank {host} is partitioned from the cluster {ranks[host].place}: {reason}"
        return Verdict(3, sentence, (Lost(host, ranks[host].place.step, reason),))
    sentence = "; ".join(f"rank {rank} lost {ranks[rank].place}: {reason}" for rank, reason in lost.items())
    return Verdict(3, sentence, tuple(Lost(rank, ranks[rank].place.step, reason) for rank, reason in lost.items()))


class FailureDetector:
    """The ranks of a run as the server in the process of rank `host` knows them."""

    def __init__(self, host: int, ranks: Iterable[int], lost_after_s: float, now: float) -> None:
        self.host = host
        self.ranks = {rank: RankState(heard_at=now) for rank in ranks}
        self.lost_after_s = lost_after_s
        self._lost_at: float | None = None  # the first of those that are to be named together

    def verdict(self, now: float) -> Verdict | None:
        """On all that are lost, once the first has been for SETTLE_S."""
        lost = lost_ranks(self.ranks, self.lost_after_s, now)
        if not lost:
            self._lost_at = None
            return None
        self._lost_at = now if self._lost_at is None else self._lost_at
        return verdict_on(lost, self.ranks, self.host) if now - self._lost_at >= SETTLE_S else None

    def add(self, rank: int, now: float) -> None:
        """A rank is here, or here again."""
        self.ranks[rank] = RankState(heard_at=now)

    def forget(self, ranks: Iterable[int]) -> None:
        """The run goes on without them."""
        for rank in ranks:
            self.ranks.pop(rank, None)
        self._lost_at = None

    def forgive(self, now: float) -> None:
        """This process did not run itself: nobody's silence counts until now."""
        for state in self.ranks.values():
            state.heard_at = now


# For whom a rank waits: said once it has begun nothing for a while, since only then is what it knows of others newer
# than its own place.
#
# A wait that is expected is not said: not for a rank that computes on purpose what the others wait for, and not one
# of a length that is normal in this run. On cores that ranks share everything takes long, this rank's own work too:
# what it takes itself, another may take twice.

SLOW_S, SLOW_AGAIN_S = 3.0, 5.0
NORMAL = 2.0  # times this rank's own longest work
# Phases, by their first words, in which these ranks compute on purpose what all others wait for: rank 0 the one process
# or the report, rank 1 the twin of the one process. Rank 0's own log says how far it is.
ALONE, COMPUTING = ("one process", "report"), (0, 1)


def waited_for(place: Place, others: Mapping[int, Place]) -> dict[int, Place]:
    """Of the other ranks those that have changed place, or begun collectives in this place, less often."""
    return {rank: each for rank, each in sorted(others.items()) if (each.turn, each.calls) < (place.turn, place.calls)}


def behind(place: Place, others: Mapping[int, Place], but: Container[int] = ()) -> list[str]:
    """The same, each with where it is, without those in `but`."""
    late = waited_for(place, others)
    return [f"rank {rank} ({each} for {each.in_phase_s:.1f} s)" for rank, each in late.items() if rank not in but]


class Slowness:
    """Where this rank was last seen, how long it worked in one place at most, and when it last said for whom it
    waits."""

    def __init__(self, now: float) -> None:
        self._place, self._since = Place(), now
        self._waited = False  # for another, when it was last looked at there
        self._longest_s = 0.0
        self._said_at = 0.0

    def sentence(self, place: Place, others: Mapping[int, Place], now: float) -> str:
        """Whom this rank waits for, if it is time to say so; else empty. `place` has the collectives begun there."""
        if (place.turn, place.calls) != (self._place.turn, self._place.calls):
            self._note_work(now)
            self._place, self._since = place, now
        late = waited_for(place, others)
        self._waited = bool(late)
        waits_s = now - self._since
        if waits_s < max(SLOW_S, NORMAL * self._longest_s) or now - self._said_at < SLOW_AGAIN_S:
            return ""
        alone = [rank for rank in COMPUTING if rank in late and late[rank].phase.startswith(ALONE)]
        named = behind(place, others, but=alone)
        if not named:
            return ""
        self._said_at = now
        return f"waiting for {waits_s:.1f} s {place} for {', '.join(named)}"

    def _note_work(self, now: float) -> None:
        """It leaves its place: what it did there was work of its own, if it waited for nobody and had begun."""
        if not self._waited and self._place.turn > 0 and not self._place.phase.startswith(ALONE):
            self._longest_s = max(self._longest_s, now - self._since)


# Where the main thread of a rank is: at which step, in which phase, and how many collectives it has begun there.
#
# The watch's thread tells it to the others with each heartbeat, so that a loss is named with the place it happened at,
# and of ranks that wait for each other the one that is behind can be found.


class MainThreadProgress:
    """Written by the main thread, read by the watch's.

    `work` is the step and phase with waits for other ranks left out; `together` is whether all ranks change place
    together, so that who has done so less often is behind: not once ranks may leave, when each goes at its own pace.
    """

    def __init__(self) -> None:
        self.place, self._since = Place(), time.monotonic()
        self.work = self.place.step, self.place.phase
        self.together = True
        self._calls_before = 0
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

    def here(self) -> Place:
        """Where it is, with the collectives that it began there."""
        calls, in_phase_s = self._calls_begun() - self._calls_before, time.monotonic() - self._since
        return replace(self.place, calls=calls, in_phase_s=round(in_phase_s, 2))

    def _move(self, step: int, phase: str) -> None:
        self._calls_before, self._since = self._calls_begun(), time.monotonic()
        self.place = Place(step, phase, self.place.turn + self.together)
