"""Who writes down what became of a broken run: the lowest survivor, and if it goes too while it writes, the next.

Survivors need not share a disk, so the one that writes tells the others; they stay until they hear it, see it on the
disk, or hear the writer no more. A rank that was given up writes nothing: it cannot know what happened since.
"""

import time
from collections.abc import Callable

from workers.cluster.heartbeat import Hearing
from workers.cluster.watch_socket import SENT_TIMES, Post

LOOK_S = 0.05
WRITING_S = 2.5  # how long a rank that is alive may take to write run.json, 0.1 to 1.2 s as a rule: its disk may hang
NEXT_S = 0.75  # and so much longer for each other survivor in between: they take it up one after another
CUT_OFF_S = 3.0  # a rank that takes itself for the one cut off leaves the word to the others, if it can see their file


class Succession:
    """The survivors as one of them knows them, on the thread that ends it; made as soon as the loss is named."""

    def __init__(
        self, survivors: list[int], hearing: Hearing, post: Post, *, given_up: bool = False, cut_off: bool = False
    ) -> None:
        self.rank = hearing.rank
        self.survivors, self.given_up = survivors, given_up
        self._hearing, self._post, self._cut_off = hearing, post, cut_off
        self._told = False
        self.named_at = time.monotonic()

    def turn(self, written: Callable[[], bool]) -> bool:
        """Wait until it is this rank's turn to write; False if another has written, which `written` may see."""
        rank = self.rank
        left_to_others = rank not in self.survivors and bool(self.survivors)
        while not (self.given_up or left_to_others):
            self._listen()
            if self._told or written():
                return False
            now = time.monotonic()
            lower = [survivor for survivor in self.survivors if survivor < rank]
            before = set(lower) & self._hearing.heard(now)
            waited_s, patience_s = now - self.named_at, WRITING_S + NEXT_S * (len(lower) - 1)
            if (not before or waited_s > patience_s) and not (self._cut_off and waited_s < CUT_OFF_S):
                return True
            time.sleep(LOOK_S)
        return False

    def _listen(self) -> None:
        for message in self._post.messages():
            if message["kind"] == "beat":
                self._hearing.take(message, time.monotonic())
            elif message["kind"] == "written":
                self._told = True

    def tell(self) -> None:
        """Tell the others that it is written."""
        for _ in range(SENT_TIMES):
            self._post.tell({"kind": "written", "rank": self.rank})
