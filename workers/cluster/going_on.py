"""Where ranks need not wait for each other, the loss of one is not the end of all: the others part from it and go on.

Rank 0 stays needed as long as it hosts the store, and so does a majority: who hears too few ranks takes itself for the
one that is cut off (verdict.py). A rank that was given up and wakes learns it from the verdict, which names it, and
ends.

Where no rank hosts what the others need, each may be lost. Then it matters whether a rank is dead or silent: a process
that dies hangs up, which `hung_up` tells, and is mourned after GONE_S; one that is silent may live on the far side of a
cut. So of two halves that do not hear each other the one with the lowest rank goes on, and the other ends.
"""

from collections.abc import Callable, Mapping, Set

from workers.cluster.heartbeat import Hearing
from workers.cluster.verdict import Seen, Verdict
from workers.cluster.watch_socket import Post
from workers.report.records import Lost

GONE_S = 1.0  # four beats: who hung up and is silent for so long has died


class Parting:
    """What one rank does with a verdict once ranks may leave; until `on_left` is set, none may."""

    def __init__(self, hearing: Hearing, post: Post, say: Callable[[str], None]) -> None:
        self._hearing, self._post, self._say = hearing, post, say
        self.on_left: Callable[[Lost], None] | None = None
        self.needed: Set[int] = {0}
        self.hung_up: Callable[[], Set[int]] = frozenset  # the ranks whose processes have closed their connections
        self.heard_at: dict[int, float] = {}  # of those that have left: when they were heard last
        self.back_at: dict[int, float] = {}  # of those that have come back: when they were taken in

    def allows(self, verdict: Verdict) -> bool:
        """Whether this rank can go on without those that the verdict names."""
        lost = {entry.rank for entry in verdict.lost}
        may_leave = self.on_left is not None and verdict.exit_code == 3 and bool(lost)
        return may_leave and not lost & (self.needed | {self._hearing.rank}) and (bool(self.needed) or self._more(lost))

    def _more(self, lost: Set[int]) -> bool:
        """Whether those that may live on without hearing this side are fewer, or as many without the lowest rank."""
        here = self._hearing.present() - lost
        silent = lost & self._hearing.present() - self.hung_up()
        return (len(here), -min(here)) > (len(silent), -min(silent, default=min(here) + 1))

    def gone(self, seen: Mapping[int, Seen]) -> Verdict | None:
        """The verdict on those that hung up and are silent since; it takes no vote."""
        dead = sorted(rank for rank in self.hung_up() & set(self._hearing.peers) if seen[rank].silent_s > GONE_S)
        if not dead:
            return None
        reason = f"its connections were closed, and no heartbeat for {GONE_S:g} s"
        sentence = "; ".join(f"rank {rank} lost {seen[rank].place}: {reason}" for rank in dead)
        return Verdict(3, sentence, tuple(Lost(rank, seen[rank].step, reason) for rank in dead))

    def taken_in(self, rank: int, now: float) -> None:
        """A rank that had left is here again."""
        self.heard_at.pop(rank, None)
        self.back_at[rank] = now

    def of_a_former_life(self, verdict: Verdict, now: float) -> bool:
        """Whether another rank says this of who has come back since: who dies again is not given up so soon."""
        lost = {entry.rank for entry in verdict.lost}
        return bool(lost) and all(now - self.back_at.get(rank, now - GONE_S) < GONE_S for rank in lost)

    def part(self, verdict: Verdict) -> bool:
        """Go on without the ranks of the verdict, and say its words to the others; False for an echo of what is
        known."""
        news = [entry for entry in verdict.lost if entry.rank in self._hearing.peers]
        if not news or self.on_left is None:
            return False
        self._post.tell_verdict(verdict, stopped=False)  # to those it names too, should they wake up
        self._say(f"{verdict.sentence}; the others go on")
        for entry in news:
            self.heard_at[entry.rank] = self._hearing.forget(entry.rank).heard_at
            del self._post.addresses[entry.rank]
            self.on_left(entry)
        return True
