"""A rank's progress in training: optimizer steps, backward passes, and passes over DataLoaders."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from distlab.lab.report.units import counted

MOST_BATCHES = 100_000  # batches of a pass for which the earlier backward passes are known
MOST_PASSES = 64
NO_LOOPS = ("step", "backward")  # suffixes of framework functions that are called in a user's loop


@dataclass
class Pass:
    """One pass over a DataLoader."""

    key: tuple[str, str, int]  # its line, its callers, and the number of earlier passes there
    file: str
    length: int = -1  # expected batches; negative if unknown
    num_read: int = 0
    ended: bool = False
    backwards: list[int] = field(default_factory=list)  # made before each of its batches, and at its end

    @property
    def line(self) -> str:
        return self.key[0]

    @property
    def words(self) -> str:
        return f"pass {self.key[2]} over the DataLoader at {self.line}"

    @property
    def is_complete(self) -> bool:
        """Return whether its last batch was read."""
        return self.ended or 0 <= self.length <= self.num_read


class Progress(NamedTuple):
    """A rank's progress so far."""

    steps: int = 0
    backwards: int = 0
    batches: int = -1  # of the newest pass; negative without one

    @property
    def text(self) -> str:
        """Return "9 optimizer steps / 9 batches of its DataLoader"."""
        batches = f" / {counted(self.batches, 'batches')} of its DataLoader" if self.batches >= 0 else ""
        return counted(self.steps, "optimizer steps") + batches


NO_PROGRESS = Progress()


@dataclass
class History:
    """The history of one rank so far."""

    now: Progress = NO_PROGRESS
    loop: str = ""  # the framework's function with the loop
    package: str = ""  # the framework's
    idle_steps: int = 0  # steps without a backward pass since the last one
    backwards_at_step: int = -1  # backward passes at the last step
    passes: dict[int, Pass] = field(default_factory=dict)
    num_passes: Counter[tuple[str, str]] = field(default_factory=Counter)  # passes at each line, by callers

    def begin_pass(self, number: int, line: str, file: str, length: int = -1, callers: str = "") -> None:
        self.passes[number] = Pass((line, callers, self.num_passes[line, callers]), file, length)
        self.num_passes[line, callers] += 1
        if len(self.passes) > MOST_PASSES:
            del self.passes[next(iter(self.passes))]

    def key(self, number: int) -> tuple[str, str, int]:
        """Return a pass's key, equal on all ranks; for an old one its number on this rank."""
        return self.passes[number].key if number in self.passes else ("", "", number)

    def read_batch(self, number: int, num_read: int) -> None:
        self.now = self.now._replace(batches=num_read)
        if (found := self.passes.get(number)) is not None:
            found.num_read = num_read
            if num_read <= MOST_BATCHES:
                found.backwards.append(self.now.backwards)

    def end_pass(self, number: int) -> None:
        if number in self.passes:
            self.passes[number].ended = True
            self.passes[number].backwards.append(self.now.backwards)

    def set_backwards(self, backwards: int) -> None:
        self.now = self.now._replace(backwards=backwards)

    def step(self, steps: int, framework: str, package: str) -> None:
        self.idle_steps += self.now.backwards == self.backwards_at_step
        self.backwards_at_step = self.now.backwards
        self.now = self.now._replace(steps=steps)
        self.loop, self.package = "" if framework.endswith(NO_LOOPS) else framework, package
