"""For whom a rank waits: said once it has begun nothing for a while, since only then are the others' last words newer than its own."""

from workers.cluster.heartbeat import Hearing, Place

SLOW_S, SLOW_AGAIN_S = 3.0, 5.0


class Slowness:
    """When this rank last went on, and when it last said whom it waits for."""

    def __init__(self, now: float) -> None:
        self._moved, self._moved_at = (0, 0), now
        self._said_at = 0.0

    def sentence(self, hearing: Hearing, place: Place, now: float) -> str:
        """Whom this rank waits for, if it is time to say so; else empty. `place` is where it is, with the collectives begun there."""
        if (place.turn, place.calls) != self._moved:
            self._moved, self._moved_at = (place.turn, place.calls), now
        waits_s = now - self._moved_at
        if waits_s < SLOW_S or now - self._said_at < SLOW_AGAIN_S:
            return ""
        behind = hearing.behind(place, now)
        if not behind:
            return ""
        self._said_at = now
        return f"waiting for {waits_s:.1f} s at step {place.step} in {place.phase} for {', '.join(behind)}"
