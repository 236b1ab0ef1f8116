"""Judges answers: on 1, 2, 3 and 4 warm ranks, forked once, in at most 10 s, under the eyes of the doctor."""

import pickle
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.rank_state import END, MATCH
from distlab.tools.puzzle.judge import judge
from distlab.tools.puzzle.rank import Ended, Job, serve
from distlab.tools.puzzle.task import WORLD_SIZES, Report, Task
from distlab.tools.testing.processes import Outcome, WarmRanks, Watching

PRELOAD = ("distlab.tools.puzzle.preloaded",)
START_S = 60.0  # for a rank to be there, on a machine that does much else; no part of a try
TRY_S = 10.0


class Figures(NamedTuple):
    """With so many ranks, of the rank that has the most."""

    world_size: int
    num_messages: int
    num_calls: int
    sent_bytes: float
    peak_bytes: int  # 0 where memory is not bounded


@dataclass(frozen=True)
class Verdict:
    """Whether an answer passed, why not, and what it took; `world_size` is the last that was run."""

    passed: bool
    world_size: int
    duration_s: float
    lines: Sequence[str] = ()  # the first is the reason
    figures: Sequence[Figures] = ()

    @property
    def reason(self) -> str:
        return self.lines[0] if self.lines else ""


class Runner(WarmRanks):
    """The ranks, all from one interpreter: a try begins after one import of torch, not after four."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.resolve())
        super().__init__(self._folder, PRELOAD)
        self._jobs = 0

    def judge(self, task: Task, file: Path, world_sizes: Sequence[int] = WORLD_SIZES) -> Verdict:
        """Run it with each number of ranks; the first that is wrong ends it."""
        self._prepare(max(world_sizes))
        begun = time.monotonic()
        figures: list[Figures] = []
        for world_size in world_sizes:
            left_s = max(1.0, TRY_S - (time.monotonic() - begun))
            reports, lines = self._tried(task, file, world_size, left_s)
            if not lines and (fault := judge(task, world_size, reports)):
                lines = [fault]
            if lines:
                return Verdict(False, world_size, time.monotonic() - begun, lines, figures)
            figures.append(figures_of(world_size, reports))
        return Verdict(True, world_sizes[-1], time.monotonic() - begun, (), figures)

    def _prepare(self, count: int) -> None:
        """Fork who is missing; raises RuntimeError."""
        for new in self.fork(count, serve, [self._folder]):
            self.hear(new, "start", START_S)

    def _tried(self, task: Task, file: Path, world_size: int, left_s: float) -> tuple[list[Report], list[str]]:
        """The reports of the ranks, or what is wrong, the sentence first."""
        files = tempfile.mkdtemp(prefix="distlab-puzzle-")
        job = Job(task.number, str(file.resolve()), world_size, files)
        try:
            outcome = self._run(job, left_s)
            if task.resume is not None:
                if not outcome.lost:
                    return [], told(outcome) or ["no rank was killed: the shard was never written in full"]
                outcome = self._run(job._replace(resumes=True), left_s)
            if outcome.is_bad:
                return [], told(outcome)
            reports = reports_of(outcome)
            if task.bound(world_size).peak_bytes is not None and not judge(task, world_size, reports):
                outcome = self._run(job._replace(meters_memory=True), left_s)
                if outcome.is_bad:
                    return [], told(outcome)
                peaks = [each.peak_bytes for each in reports_of(outcome)]
                reports = [replace(each, peak_bytes=peak) for each, peak in zip(reports, peaks, strict=True)]
            return reports, []
        finally:
            shutil.rmtree(files, ignore_errors=True)

    def _run(self, job: Job, left_s: float) -> Outcome:
        self._prepare(job.world_size)  # some may have been killed
        self._jobs += 1
        job = job._replace(number=self._jobs)
        ranks = self._ranks[: job.world_size]
        for rank in ranks:
            rank.begin(job)
        outcome = Watching(ranks, left_s).until_the_end()
        if outcome.is_bad:
            self.kill()
        return outcome

    def close(self) -> None:
        self.kill()
        self.close_servers()
        self.close_store()


def reports_of(outcome: Outcome) -> list[Report]:
    """By rank, of ranks that have all ended well."""
    ended = [outcome.ended[rank] for rank in sorted(outcome.ended)]
    return [pickle.loads(each.report) for each in ended if isinstance(each, Ended)]


def told(outcome: Outcome) -> list[str]:
    """What went wrong on the ranks, the most telling first: what a rank raised itself, what does not match, a hang."""
    raised: dict[str, list[int]] = {}
    for rank, each in sorted(outcome.ended.items()):
        if each.outcome == "failed" and isinstance(each, Ended):
            text = f"{each.text.splitlines()[0]}, at {each.line}" if each.line else each.text
            raised.setdefault(text, []).append(rank)
    found = [each for each in outcome.findings if each.check != END]
    lines = [f"rank {rank} {how}" for rank, how in outcome.lost.items() if not any(f.check == MATCH for f in found)]
    for finding in found:
        lines.append(finding.sentence)
        lines += ["  ".join(row).rstrip() for row in finding.rows]
    blamed = {rank for each in outcome.findings if each.check == END for rank in each.ranks}
    own = {text: ranks for text, ranks in raised.items() if blamed & set(ranks)} or raised
    if outcome.late:
        lines.append(outcome.late)
        lines += ["  ".join(row) for row in outcome.rows]
    if not found:
        lines += [f"{name_ranks(ranks)} raised {text}" for text, ranks in own.items()]
    if not lines:
        lines = [each.sentence for each in outcome.findings]
    printed = [f"rank {rank} printed: {text.strip()[-300:]}" for rank, text in outcome.printed.items() if text.strip()]
    return lines + printed if lines else []


def figures_of(world_size: int, reports: Sequence[Report]) -> Figures:
    return Figures(
        world_size,
        max(each.num_messages for each in reports),
        max(each.num_calls for each in reports),
        max(each.sent_bytes for each in reports),
        max(each.peak_bytes for each in reports),
    )
