"""For whom a rank waits: said once it has begun nothing for a while, since only then are others' words newer than its
own.

A wait that is expected is not said: not for a rank that computes on purpose what the others wait for, and not one of a
length that is normal in this run. On cores that ranks share everything takes long, this rank's own work too: what it
takes itself, another may take twice.
"""

from workers.cluster.heartbeat import Hearing, Place

SLOW_S, SLOW_AGAIN_S = 3.0, 5.0
NORMAL = 2.0  # times this rank's own longest work
# Phases, by their first words, in which these ranks compute on purpose what all others wait for: rank 0 the one process
# or the report, rank 1 the twin of the one process. Rank 0's own log says how far it is.
ALONE, COMPUTING = ("one process", "report"), (0, 1)


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
