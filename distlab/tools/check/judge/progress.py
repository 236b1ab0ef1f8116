"""How far a rank's training has come: its optimizer's steps, its backward passes, its passes over DataLoaders."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from distlab.lab.report.units import counted

MOST_DRAWN = 100_000  # batches of a pass of which the backward passes before them are known
MOST_PASSES = 64
NO_LOOPS = ("step", "backward")  # endings of a framework's functions that are called in a loop of the user's own


@dataclass
class Pass:
    """One pass over a DataLoader."""

    key: tuple[str, str, int]  # its line, the lines that called it, and how many passes were made there before
    file: str
    length: int = -1  # batches that it is to have; below 0 where that is not known
    drawn: int = 0
    ended: bool = False
    backwards: list[int] = field(default_factory=list)  # that were made before each of its batches, and at its end

    @property
    def line(self) -> str:
        return self.key[0]

    @property
    def words(self) -> str:
        return f"pass {self.key[2]} over the DataLoader at {self.line}"

    @property
    def has_all(self) -> bool:
        """Whether its last batch is drawn."""
        return self.ended or 0 <= self.length <= self.drawn


class Progress(NamedTuple):
    """What a rank has done until now."""

    steps: int = 0
    backwards: int = 0
    batches: int = -1  # of the newest pass; below 0 where there is none

    @property
    def text(self) -> str:
        """ "9 optimizer steps / 9 batches of its DataLoader"."""
        batches = f" / {counted(self.batches, 'batches')} of its DataLoader" if self.batches >= 0 else ""
        return counted(self.steps, "optimizer steps") + batches


NOWHERE = Progress()


@dataclass
class Course:
    """One rank's way so far."""

    now: Progress = NOWHERE
    loop: str = ""  # the framework's function that has the loop
    package: str = ""  # the framework's
    idle: int = 0  # steps without a backward pass since the one before
    stepped_after: int = -1  # backward passes, at the last step
    passes: dict[int, Pass] = field(default_factory=dict)
    begun: Counter[tuple[str, str]] = field(default_factory=Counter)  # passes at each line, by its callers

    def begin_pass(self, number: int, line: str, file: str, length: int = -1, callers: str = "") -> None:
        self.passes[number] = Pass((line, callers, self.begun[line, callers]), file, length)
        self.begun[line, callers] += 1
        if len(self.passes) > MOST_PASSES:
            del self.passes[next(iter(self.passes))]

    def key(self, number: int) -> tuple[str, str, int]:
        """What a pass is known by on all ranks; of one that is long over its number on this rank."""
        return self.passes[number].key if number in self.passes else ("", "", number)

    def draw(self, number: int, drawn: int) -> None:
        self.now = self.now._replace(batches=drawn)
        if (found := self.passes.get(number)) is not None:
            found.drawn = drawn
            if drawn <= MOST_DRAWN:
                found.backwards.append(self.now.backwards)

    def end_pass(self, number: int) -> None:
        if number in self.passes:
            self.passes[number].ended = True
            self.passes[number].backwards.append(self.now.backwards)

    def make_backward(self, backwards: int) -> None:
        self.now = self.now._replace(backwards=backwards)

    def step(self, steps: int, framework: str, package: str) -> None:
        self.idle += self.now.backwards == self.stepped_after
        self.stepped_after = self.now.backwards
        self.now = self.now._replace(steps=steps)
        self.loop, self.package = "" if framework.endswith(NO_LOOPS) else framework, package
