"""The verdict of a run that came through is decided once: every rank returns it, or none does.

Any rank may die or be paused between any two lines, so no rank may act on the verdict while another could still end
otherwise. Three rounds of beats, each a mask of ranks that all beats carry on (non-blocking commit: D. Skeen, SIGMOD
1981; here every rank hears every other, and verdict.py says who is silent):

    accepted   it has the verdict that rank 0 gave, and will return it
    bound      it knows that all have accepted: it gives up nobody by its own judgement any more
    committed  it knows that all are bound: the verdict stands, whatever it hears

While no survivor is bound nobody can have committed: a silent rank is lost, and so is the run; when that rank wakes it
is bound at most, and learns that it was given up. Once a survivor is bound the silent rank had accepted: the survivors
finish without it and return the verdict, and so does it, when it wakes and hears their beats.
"""

import threading

from workers.cluster.heartbeat import Hearing, to_mask


class Agreement:
    """How far one rank has come; `look` is called with every beat, on the watch's thread."""

    def __init__(self, hearing: Hearing) -> None:
        self._hearing = hearing
        self._accepts = False
        self._committed = threading.Event()

    def accept(self) -> None:
        """This rank has the verdict."""
        self._accepts = True

    def look(self) -> None:
        """Go on as far as what was heard allows."""
        hearing = self._hearing
        own, everyone = to_mask([hearing.rank]), to_mask([hearing.rank, *hearing.peers])
        if self._accepts:
            hearing.accepted |= own
        if everyone & ~hearing.accepted == 0:
            hearing.bound |= own
        if everyone & ~hearing.bound == 0:
            self._committed.set()

    @property
    def bound(self) -> bool:
        """Whether the loss of another rank changes the verdict no more."""
        return bool(self._hearing.bound >> self._hearing.rank & 1)

    @property
    def under_way(self) -> bool:
        """Whether this rank waits for the others' word on the verdict."""
        return self._accepts and not self.committed

    @property
    def committed(self) -> bool:
        """Whether the verdict stands."""
        return self._committed.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Until the verdict stands; False after `timeout_s`."""
        return self._committed.wait(timeout_s)

    def missing(self) -> set[int]:
        """The ranks that have not accepted."""
        return {rank for rank in self._hearing.peers if not self._hearing.accepted >> rank & 1}
