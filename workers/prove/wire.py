"""What the file's own steps send: the sockets' counters over each step, without what the proof sends meanwhile.

A proof sends more than what it proves: one process's numbers to all, everyone's tensors to each other, and inside of a
step the whole of a sharded gradient, as the optimizer is about to step. All of that runs in `unseen`, and what the
sockets sent in it is taken away again. Collectives are over when a step returns, so its bytes are with the kernel.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from workers.check.recording import Recorder
from workers.check.telling import Telling
from workers.check.waits import Waits

Sent: TypeAlias = Counter[tuple[tuple[str, int], tuple[str, int]]]  # bytes by the two ends of a connection


class Wire:
    """Counts the steps of one rank; `tell` at the end. Where the system has no counters, nothing is told."""

    def __init__(self, telling: Telling, recorder: Recorder, waits: Waits) -> None:
        self._telling, self._recorder, self._waits = telling, recorder, waits
        self._steps = 0
        self._sent: Sent = Counter()
        self._inside = False
        telling.say("counting", False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the file's: its calls and its bytes count."""
        before = self._now()
        self._inside = True
        self._telling.say("counting", True)
        try:
            yield
        finally:
            self._telling.say("counting", False)
            self._inside = False
        self._steps += 1
        self._add(before, self._now(), 1)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is called meanwhile is the proof's own: it is not told, and its bytes do not count."""
        outermost = self._inside and not self._recorder.hidden()
        before = self._now() if outermost else Counter()
        with self._recorder.unseen():
            yield
        if outermost:
            self._add(before, self._now(), -1)

    def tell(self) -> None:
        """All steps, to the doctor."""
        found = [(near, far, nbytes) for (near, far), nbytes in self._sent.items()]
        self._telling.say("wire", self._steps, found)

    def _now(self) -> Sent:
        return Counter(self._waits.sent())

    def _add(self, before: Sent, after: Sent, sign: int) -> None:
        for ends, sent in after.items():
            self._sent[ends] += sign * (sent - before[ends])
