"""Where the main thread of a rank is: at which step, in which phase, and how many collectives it has begun there.

The watch's thread tells it to the others with each beat, so that a loss is named with the place it happened at, and of
ranks that wait for each other the one that is behind can be found.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from workers.cluster.heartbeat import Place

if TYPE_CHECKING:
    import torch.distributed as dist


class Whereabouts:
    """Written by the main thread, read by the watch's.

    `work` is the step and phase with waits for other ranks left out; `together` is whether all ranks change place
    together, so that who has done so less often is behind: not once ranks may leave, when each goes at its own pace.
    """

    def __init__(self) -> None:
        self.place = Place(since=time.monotonic())
        self.work = self.place.step, self.place.phase
        self.together = True
        self._calls_begun: Callable[[], int] = lambda: 0

    def follow(self, group: "dist.ProcessGroup") -> None:
        """From now on count the collectives that this rank begins in `group`: gloo and NCCL number them."""
        self._calls_begun = group._get_sequence_number_for_group  # type: ignore[attr-defined]

    def at(self, step: int, phase: str) -> None:
        """Note where the main thread is."""
        self.work = step, phase
        self._move(step, phase)

    def part(self) -> None:
        """From now on each rank goes at its own pace: who has changed place how often says nothing."""
        self.together, self.place = False, replace(self.place, turn=0)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a wait for the other ranks, outside of any collective."""
        before = self.place
        self._move(before.step, f"the wait at {what}")
        yield
        self._move(before.step, before.phase)

    def here(self) -> Place:
        """Where it is, with the collectives that it began there."""
        place = self.place
        return replace(place, calls=self._calls_begun() - place.calls)

    def _move(self, step: int, phase: str) -> None:
        self.place = Place(self.place.turn + self.together, step, phase, time.monotonic(), self._calls_begun())
