"""Losses on purpose: which rank dies, at which step, and where in it, all drawn by LAB_SEED.

A rank that dies here closes its sockets without a word, as the kernel does for a process that is killed, and forgets
all that it had: its peers cannot tell the difference. For real it is `docker kill`, or `python -m benchmarks.elastic`.

    computed   it has its gradient, and gives it to nobody: the step is redone without it
    torn       it dies in the all_reduce, and so late that some have the sum and one has not: the step is kept
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

COMPUTED, TORN = "computed", "torn"
BACK_AFTER = 2  # steps that the others go on without a rank that comes back


class Killed(Exception):
    """What a rank raises where it dies."""


class Torn(RuntimeError):
    """What gloo raises where the sum does not come."""


class Loss(NamedTuple):
    """Rank `rank` dies in `step`; where it is torn, `without` is the survivor that does not get the sum."""

    step: int
    rank: int
    moment: str
    without: int | None = None


def drawn(seed: int, ranks: list[int], steps: int, losses: int, *, comes_back: bool) -> list[Loss]:
    """Up to `losses` of them in a training of `steps` steps by `ranks`, in the order of steps.

    Somebody is always left: where nobody comes back, of N ranks N - 1 can be lost. After the last one there are steps
    enough for whoever comes back.
    """
    draw = random.Random(seed)
    there, made = list(ranks), list[Loss]()
    room = steps - 1 - BACK_AFTER
    for number in range(min(losses, max(0, room))):
        if len(there) < 2:
            break
        rank = draw.choice(there)
        left = [each for each in there if each != rank]
        torn = number % 2 == 0 and len(left) > 1
        step = 1 + number * room // losses
        made.append(Loss(step, rank, TORN if torn else COMPUTED, draw.choice(left) if torn else None))
        if not comes_back:
            there = left
    return made


class Drill:
    """The losses as one rank meets them: `at` is called between the parts of each step."""

    def __init__(self, losses: list[Loss], rank: int) -> None:
        self.losses, self.rank = losses, rank
        self._ahead = list(losses)

    def at(self, step: int, moment: str) -> None:
        """Raise `Killed` where this rank dies now, `Torn` where it is left without the sum; each once."""
        for loss in self._now(step, moment):
            self._ahead.remove(loss)
            if loss.rank == self.rank:
                raise Killed
            raise Torn("the sum did not come")

    def _now(self, step: int, moment: str) -> Iterator[Loss]:
        for loss in list(self._ahead):
            place = "computed" if loss.moment == COMPUTED else "summed"
            if loss.step == step and place == moment and self.rank in (loss.rank, loss.without):
                yield loss

    def waits_for(self, step: int) -> bool:
        """Whether at `step` the others wait for a rank that comes back, so that it shows however fast the steps are."""
        return any(loss.step + BACK_AFTER == step for loss in self.losses)
