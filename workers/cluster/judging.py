"""When a silence becomes a verdict: once every table shows the same break, and by the lowest survivor first.

A rank that fell silent is missing in its neighbours' tables at moments that differ by a stamp, a beat and a look. Who
judged at once might name one rank where two were lost, or another rank than its neighbour does. So a break has to stand
for SETTLE_S; then the lowest of those who agree speaks, and the others leave it FOLLOW_S to be heard, to repeat its
words. Between ranks that live a link is broken only if each of them has beaten since the break was seen: a watch that
is late by a second hears a rank that was killed for a second longer than its neighbours do.
"""

from collections.abc import Iterable

from workers.cluster.heartbeat import Hearing, Place
from workers.cluster.pulse import hops_of
from workers.cluster.verdict import Verdict, condemn

# A stamp, a beat and a look, a period each: then every table shows the same break; so much a hop of news. Of two deaths
# 0.1 s apart all of 8 tables showed the same after 0.78 s at most, of 33 after 0.97, of 64 after 1.75.
SETTLE_S = 0.75
FOLLOW_S = 0.5  # how long the others leave the word to the lowest survivor


class Judging:
    """What one rank makes of what it hears."""

    def __init__(self, rank: int, hearing: Hearing) -> None:
        self.rank, self.hearing = rank, hearing
        self.settle_s = SETTLE_S * hops_of(len(hearing.peers))
        self._broken_at: float | None = None
        self._counts: dict[int, int] = {}  # of each rank's heartbeats, when the break was seen

    def verdict(self, place: Place, now: float) -> Verdict | None:
        """Who is lost, if that has stood for long enough; None while the cluster is whole, or for a moment more."""
        hears = self.hearing.hears(now)
        found = condemn(hears, self.hearing.present(), self.hearing.seen(place, now))
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
