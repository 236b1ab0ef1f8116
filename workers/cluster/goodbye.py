"""The normal end of a rank: its goodbye is repeated until all who still run have heard it.

Who left before the others knew would be silent to them, and given up. Rank 0 hosts the store and leaves last, once it
has heard the goodbyes of all. Who goes says so with its last beats: it acknowledges nothing any more, and whoever
waited for that took its silence for a loss, 2.5 s at the end of most runs. Who is lost after the verdict changes
nothing: nobody waits for it, and it is named.
"""

from collections.abc import Callable

from workers.cluster import name_ranks
from workers.cluster.heartbeat import Hearing, to_mask, to_ranks
from workers.cluster.verdict import Verdict

AFTER = "after the verdict, which stands"


class Goodbye:
    """Of one rank. `outlived` are the ranks that were lost after the verdict, `host` the one that keeps the store."""

    def __init__(self, rank: int, hearing: Hearing, say: Callable[[str], None]) -> None:
        self.rank, self.hearing, self.say = rank, hearing, say
        self.outlived: set[int] = set()
        self.host = 0

    def heard(self, now: float, end_by: float, *, committed: bool) -> bool:
        """Whether this rank may go: every rank that still sends has heard the goodbye, and on rank 0 has said its own;
        or it is later than `end_by`. Those that fell silent since all were `committed` to a verdict are named."""
        self.hearing.ended |= to_mask([self.rank])
        gone = self.hearing.silent(now)
        waiting = [rank for rank in self.hearing.peers if rank not in gone and not self._parted(rank)]
        if waiting and now <= end_by:
            return False
        silent = gone - to_ranks(self.hearing.ended)  # who has heard this goodbye may be at work on its own
        if silent and committed:
            self.say(f"{name_ranks(silent)} lost: {AFTER}")
            self.outlived |= silent
        self.leave()
        return True

    def leave(self) -> None:
        """From now on no beat of this rank is to come."""
        self.hearing.ended |= to_mask([self.rank])
        self.hearing.left |= to_mask([self.rank])

    def _parted(self, other: int) -> bool:
        """Whether it has gone, or heard this goodbye; rank 0 waits for its own, too."""
        if self.hearing.left >> other & 1:
            return True
        knows = bool(self.hearing.peers[other].acknowledged >> self.rank & 1)
        return knows and (self.rank != self.host or bool(self.hearing.ended >> other & 1))

    def outlive(self, verdict: Verdict, now: float) -> None:
        """Ranks were lost that had accepted the run's verdict: it stands, and nobody waits for them."""
        named, peers = {entry.rank for entry in verdict.lost}, set(self.hearing.peers)
        lost = named & peers or peers - self.hearing.heard(now)  # the one cut off may be this rank
        self.say(f"{verdict.sentence}: {AFTER}")
        self.outlived |= lost
        for rank in lost:
            self.hearing.forget(rank)  # its address stays: it may wake, and hear that the verdict stands
