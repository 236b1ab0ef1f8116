"""For whom a rank waits: said once it has begun nothing for a while, since only then are others' words newer than its
own.

A wait that is expected is not said: not while rank 0 does what it alone does, and not one of a length that is normal in
this run. On cores that ranks share everything takes long, this rank's own work too: what it takes itself, another may
take twice.
"""

from workers.cluster.heartbeat import Hearing, Place

SLOW_S, SLOW_AGAIN_S = 3.0, 5.0
NORMAL = 2.0  # times this rank's own longest work
ALONE = ("one process", "report")  # what rank 0 does while all others wait


class Slowness:
    """Where this rank was last seen, how long it worked in one place at most, and when it last said for whom it
    waits."""

    def __init__(self, now: float) -> None:
        self._place, self._since = Place(), now
        self._waited = False  # for another, when it was last looked at there
        self._longest_s = 0.0
        self._said_at = 0.0

    def sentence(self, hearing: Hearing, place: Place, now: float) -> str:
        """Whom this rank waits for, if it is time to say so; else empty. `place` has the collectives begun there."""
        if (place.turn, place.calls) != (self._place.turn, self._place.calls):
            self._note_work(now)
            self._place, self._since = place, now
        waited_for = hearing.waited_for(place)
        self._waited = bool(waited_for)
        waits_s = now - self._since
        if waits_s < max(SLOW_S, NORMAL * self._longest_s) or now - self._said_at < SLOW_AGAIN_S:
            return ""
        if all(rank == 0 and peer.seen.phase in ALONE for rank, peer in waited_for.items()):
            return ""
        self._said_at = now
        behind = ", ".join(hearing.behind(place, now))
        return f"waiting for {waits_s:.1f} s at step {place.step} in {place.phase} for {behind}"

    def _note_work(self, now: float) -> None:
        """It leaves its place: what it did there was work of its own, if it waited for nobody and had begun."""
        if not self._waited and self._place.turn > 0 and self._place.phase not in ALONE:
            self._longest_s = max(self._longest_s, now - self._since)
