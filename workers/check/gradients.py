"""Whether gradients were divided by the number of ranks once: asked, as no run can prove it.

A loss may be a mean over a rank's samples or over all of them, so a sum that nobody divides may be right. What can be
seen is whether anything touched the tensors between their all_reduce and the step, and by how much they were scaled
there: over three steps, to a part in a thousand.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from workers.check.casebook import Case

NEAR = 1e-3
ENOUGH = 2  # steps of each rank


class Step(NamedTuple):
    """The gradient at a step beside what was reduced."""

    ratio: float  # of their norms
    by_script: bool  # the all_reduce is the script's own, else DDP's
    untouched: bool  # since the all_reduce
    size: int  # of the group
    reduced_at: str
    stepped_at: str


class Gradients:
    """The first steps of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._steps: dict[int, list[Step]] = defaultdict(list)

    def take(
        self, case: Case, ratio: float, by_script: bool, untouched: bool, size: int, reduced_at: int, stepped_at: int
    ) -> None:
        """One step of one rank."""
        places = case.place(reduced_at).line, case.place(stepped_at).line
        self._steps[case.rank].append(Step(ratio, by_script, untouched, size, *places))

    def questions(self) -> Iterator[str]:
        """Whether they were divided never, or twice."""
        steps = [step for of_rank in self._steps.values() for step in of_rank]
        if len(self._steps) < self._world_size or len(steps) < ENOUGH * self._world_size or steps[0].size < 2:
            return
        size, first = steps[0].size, steps[0]
        if all(step.by_script and step.untouched and abs(step.ratio - 1) < NEAR for step in steps):
            yield (
                f"are the gradients meant as a sum over {size} ranks? Nothing divides them between their all_reduce at"
                f" {first.reduced_at} and the step at {first.stepped_at}; where the loss is a mean over a rank's own"
                f" samples, a step is {size} times too long"
            )
        elif all(not step.by_script and abs(step.ratio * size - 1) < NEAR for step in steps):
            yield (
                f"are the gradients divided by {size} twice? DDP has divided them, and at the step at"
                f" {first.stepped_at} they are 1/{size} of that"
            )
