"""Where ranks need not wait for each other, the loss of one is not the end of all: the others part from it and go on.

Rank 0 stays needed, and so does a majority: who hears too few ranks takes itself for the one that is cut off
(verdict.py). A rank that was given up and wakes learns it from the verdict, which names it, and ends.
"""

from collections.abc import Callable

from workers.cluster.heartbeat import Hearing
from workers.cluster.verdict import Verdict
from workers.cluster.watch_socket import Post
from workers.report.records import Lost


class Parting:
    """What one rank does with a verdict once ranks may leave; until `on_left` is set, none may."""

    def __init__(self, hearing: Hearing, post: Post, say: Callable[[str], None]) -> None:
        self._hearing, self._post, self._say = hearing, post, say
        self.on_left: Callable[[Lost], None] | None = None
        self.heard_at: dict[int, float] = {}  # of those that have left: when they were heard last

    def allows(self, verdict: Verdict) -> bool:
        """Whether this rank can go on without those that the verdict names."""
        lost = {entry.rank for entry in verdict.lost}
        return self.on_left is not None and verdict.exit_code == 3 and bool(lost) and not lost & {0, self._hearing.rank}

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
