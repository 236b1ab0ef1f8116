"""Judge answers on 1, 2, 3 and 4 warm ranks, forked once, in at most 10 s, under the coordinator of `distlab check`."""

import pickle
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from distlab.tools.puzzle.judge import judge
from distlab.tools.puzzle.rank import Answers, Ended, Job
from distlab.tools.puzzle.task import WORLD_SIZES, Report, Task
from distlab.tools.ranks.pool import Outcome, WarmRanks

TRY_S = 10.0
GROUP_S = 60.0  # of a call: longer than any try


class Figures(NamedTuple):
    """Measurements of one world size, of the rank with the most."""

    world_size: int
    num_messages: int
    num_calls: int
    sent_bytes: float
    peak_bytes: int  # 0 if memory is not bounded


@dataclass(frozen=True)
class Verdict:
    """Whether an answer passed, why not, and its costs; `world_size` is the last that was run."""

    passed: bool
    world_size: int
    duration_s: float
    lines: Sequence[str] = ()  # the first is the reason
    figures: Sequence[Figures] = ()

    @property
    def reason(self) -> str:
        return self.lines[0] if self.lines else ""


class Runner(WarmRanks):
    """The ranks, all from one interpreter: a run waits for one import of torch, not four."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Answers, str(folder.resolve()), preload=[Answers.__module__])

    def judge(self, task: Task, file: Path, world_sizes: Sequence[int] = WORLD_SIZES) -> Verdict:
        """Run it with each number of ranks, up to the first error."""
        self.ensure(max(world_sizes))  # not counted as a run's time
        begun = time.monotonic()
        figures: list[Figures] = []
        for world_size in world_sizes:
            left_s = max(1.0, TRY_S - (time.monotonic() - begun))
            reports, lines = self._try(task, file, world_size, left_s)
            if not lines and (fault := judge(task, world_size, reports)):
                lines = [fault]
            if lines:
                return Verdict(False, world_size, time.monotonic() - begun, lines, figures)
            figures.append(figures_of(world_size, reports))
        return Verdict(True, world_sizes[-1], time.monotonic() - begun, (), figures)

    def _try(self, task: Task, file: Path, world_size: int, left_s: float) -> tuple[list[Report], list[str]]:
        """Return the ranks' reports, or the lines of an error, the sentence first."""
        files = tempfile.mkdtemp(prefix="distlab-puzzle-")

        def run(*, resumes: bool = False, meters_memory: bool = False) -> Outcome:
            group = self.next_group(world_size, GROUP_S)
            job = Job(task.number, str(file.resolve()), group, files, resumes, meters_memory)
            return self.run([job] * world_size, left_s)

        try:
            outcome = run()
            if task.resume is not None:
                if not outcome.lost:
                    unharmed = ["no rank was killed: the shard was never written in full"]
                    return [], error_lines(outcome) if outcome.is_bad else unharmed
                outcome = run(resumes=True)
            if outcome.is_bad:
                return [], error_lines(outcome)
            reports = reports_of(outcome)
            if task.bound(world_size).peak_bytes is not None and not judge(task, world_size, reports):
                outcome = run(meters_memory=True)
                if outcome.is_bad:
                    return [], error_lines(outcome)
                peaks = [each.peak_bytes for each in reports_of(outcome)]
                reports = [replace(each, peak_bytes=peak) for each, peak in zip(reports, peaks, strict=True)]
            return reports, []
        finally:
            shutil.rmtree(files, ignore_errors=True)


def reports_of(outcome: Outcome) -> list[Report]:
    """Return the reports by rank, if all ranks passed."""
    ended = [outcome.ended[rank] for rank in sorted(outcome.ended)]
    return [pickle.loads(each.report) for each in ended if isinstance(each, Ended)]


def error_lines(outcome: Outcome) -> list[str]:
    """Return the ranks' errors, and what they printed."""
    printed = [f"rank {rank} printed: {text.strip()[-300:]}" for rank, text in outcome.printed.items() if text.strip()]
    return outcome.lines() + printed


def figures_of(world_size: int, reports: Sequence[Report]) -> Figures:
    return Figures(
        world_size,
        max(each.num_messages for each in reports),
        max(each.num_calls for each in reports),
        max(each.sent_bytes for each in reports),
        max(each.peak_bytes for each in reports),
    )
