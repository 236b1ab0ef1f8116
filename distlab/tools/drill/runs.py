"""Start the ranks of one run in a separate working folder, follow them, and end them all.

The ranks are forked from this process. Their supervisor is that of `distlab check`, so hangs, mismatched calls and
exceptions of a script are reported as there. After the fault all other ranks are killed, as a launcher does.
"""

import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from distlab.lab.cluster import name_ranks
from distlab.lab.config import ConfigError
from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.check.judge.failures import last_call
from distlab.tools.check.start.script import Job
from distlab.tools.check.start.script_process import READ_S, ScriptChannel, ScriptMonitor, begin_all, fork_script, poll
from distlab.tools.check.watch.reporter import now
from distlab.tools.drill.recording import TERM, Fault, RankSettings

MOST_COPIED = 1 << 28  # bytes of a working folder
GRACE_S = 10.0  # from SIGTERM to SIGKILL
AT_LEAST_S, TIMES = 60.0, 5.0  # the limit of a run after the whole one: seconds, or a multiple of its time


NO_FAULT = Fault()


class RecordedRun(NamedTuple):
    """The records of a run's ranks, and how it ended."""

    folder: Path
    facts: Sequence[Sequence[Mapping[str, Any]]]  # of each rank
    failed: str  # a sentence; empty if it ended well, or by its fault
    hit: bool  # whether the fault occurred

    def steps(self, rank: int = 0) -> list[Mapping[str, Any]]:
        return [each for each in self.facts[rank] if "step" in each]

    @property
    def ended(self) -> Sequence[Mapping[str, Any]]:
        """The last fact of each rank that reached the end of its training."""
        return [each for mine in self.facts for each in mine if "ended" in each]

    @property
    def num_steps(self) -> int:
        """Steps that all ranks have begun."""
        return min((len(self.steps(rank)) for rank in range(len(self.facts))), default=0)

    def all(self, kind: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return ((rank, each) for rank, mine in enumerate(self.facts) for each in mine if kind in each)


class Ranks:
    """Starts the runs of one script, which write under `top` only."""

    def __init__(self, job: Job, top: Path, state: Path | None, collective_s: float) -> None:
        self._job, self._top, self._state = job, top, state
        self._collective_s, self._bound_s = collective_s, float("inf")

    def work_of(self, name: str) -> Path:
        return self._top / name / "work"

    def prepare(self, name: str, before: Path | None = None) -> Path:
        """Return a working folder for the runs of this name: a copy of `before`, or of the script's folder."""
        work = self.work_of(name)
        if before is not None:
            shutil.copytree(before, work, symlinks=True, ignore=uncopied)
        else:
            copy_folder(self._job.folder, work, self._state)
        (work / "tmp").mkdir(exist_ok=True)
        return work

    def run(self, name: str, work: Path, size: int, words: Sequence[str], fault: Fault = NO_FAULT) -> RecordedRun:
        """Run to the end, or to the fault; no process of it remains."""
        folder = self._top / name / f"facts-{len(list((self._top / name).iterdir()))}"
        folder.mkdir(parents=True)
        began = time.monotonic()
        job = self._job._replace(words=tuple(words))
        channels: list[ScriptChannel] = []
        try:
            channels += [fork_script(job, None) for _ in range(size)]
            self._begin(channels, folder, work, fault)
            failed, hit = self._follow(channels, folder, fault)
        finally:
            for each in channels:
                each.kill()
                each.close()
        if self._bound_s == float("inf"):
            self._bound_s = max(AT_LEAST_S, TIMES * (time.monotonic() - began))
        facts = [read_facts(folder / f"rank{rank}.jsonl") for rank in range(size)]
        return RecordedRun(folder, facts, failed, hit)

    def _begin(self, channels: Sequence[ScriptChannel], folder: Path, work: Path, fault: Fault) -> None:
        def settings(rank: int) -> str:
            mine = fault if fault.rank == rank else NO_FAULT
            return json.dumps(RankSettings(str(folder), str(work), rank, len(channels), mine))

        begin_all(channels, work, settings, TMPDIR=work / "tmp")

    def _follow(self, channels: Sequence[ScriptChannel], folder: Path, fault: Fault) -> tuple[str, bool]:
        """Follow the ranks until all have ended, one has failed, or the fault has occurred. Return why the run failed,
        and whether the fault occurred."""
        coordinator = Coordinator(len(channels), self._job.hang_after_s, self._collective_s, lambda _: None)
        began = progress_at = time.monotonic()
        num_bytes = 0
        for _ in poll(channels, coordinator):
            victim = channels[fault.rank].process if fault.kind else None
            if victim is not None and victim.exitcode is not None and victim.exitcode < 0:
                return "", True
            if fault.kind == TERM and has_fault(folder / f"rank{fault.rank}.jsonl"):
                self._stop_all(channels)
                return "", True
            written = sum(file.stat().st_size for file in folder.glob("*.jsonl"))
            if written != num_bytes:
                num_bytes, progress_at = written, time.monotonic()
            late = [case for case in coordinator.states if case.exit_code is None]
            if late and time.monotonic() - progress_at > self._collective_s:
                steps = len([each for each in read_facts(folder / f"rank{late[0].rank}.jsonl") if "step" in each])
                return (
                    f"{name_ranks([case.rank for case in late])} took no step for {self._collective_s:g} s"
                    f" (LAB_COLLECTIVE_TIMEOUT_S) after step {steps}{last_call(late[0])}"
                ), False
            if late and time.monotonic() - began > self._bound_s:
                return f"{name_ranks([case.rank for case in late])} had not ended after {self._bound_s:.0f} s", False
        coordinator.evaluate(now())
        return why_failed(coordinator), bool(fault.kind) and has_fault(folder / f"rank{fault.rank}.jsonl")

    def _stop_all(self, channels: Sequence[ScriptChannel]) -> None:
        """Send SIGTERM to every remaining rank, and give it time to end."""
        for each in channels:
            with suppress(ProcessLookupError):
                os.kill(each.process.pid or 0, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        monitors = [ScriptMonitor(each) for each in channels]
        ended = set[int]()
        while time.monotonic() < until and len(ended) < len(channels):
            for rank, monitor in enumerate(monitors):
                lines = monitor.lines(READ_S / len(monitors))
                if any(b'"ended"' in line or b'"gone"' in line for line in lines):
                    ended.add(rank)


def why_failed(coordinator: Coordinator) -> str:
    raised = [case.raised for case in coordinator.states if case.raised is not None]
    if raised:
        text = str(raised[0].text).strip().partition("\n")[0].partition(". ")[0]
        return f"{raised[0].kind}: {text} ({raised[0].place})"
    if any(case.exit_code for case in coordinator.states) or not coordinator.completed:
        codes = [f"rank {case.rank} exited with {case.exit_code}" for case in coordinator.states if case.exit_code]
        return next((each.sentence for each in coordinator.findings), ", ".join(codes))
    return ""


def has_fault(file: Path) -> bool:
    return file.exists() and b'{"fault"' in file.read_bytes()


def read_facts(file: Path) -> list[Mapping[str, Any]]:
    """Return a rank's facts, without an incomplete last line."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def copy_folder(folder: Path, work: Path, state: Path | None) -> None:
    """Copy the files next to the script, with links to hidden ones; if there is a `state`, copy that and link the rest.
    Raises ConfigError for a folder that is too large."""
    work.mkdir(parents=True)
    total = 0
    for entry in sorted(folder.iterdir()):
        own = state is None or state == entry or entry in state.parents
        if work.is_relative_to(entry):
            continue  # it contains the copies
        if entry.name.startswith(".") or entry.name == "__pycache__" or not own or not entry.exists():
            (work / entry.name).symlink_to(entry.resolve())
            continue
        for file in chain([entry], entry.rglob("*")):
            total += file.lstat().st_size
            if total > MOST_COPIED:
                what = f"{folder} is larger than {MOST_COPIED >> 20} MiB"
                raise ConfigError([f"{what}: name the part that the script writes with --state DIR"])
        copy = partial(shutil.copytree, symlinks=True, ignore=uncopied) if entry.is_dir() else shutil.copy2
        copy(entry, work / entry.name)
    if state is not None and not state.is_relative_to(folder):
        (work / "state").mkdir()
        if state.exists():
            shutil.copytree(state, work / "state", symlinks=True, ignore=uncopied, dirs_exist_ok=True)


def uncopied(folder: str, names: list[str]) -> list[str]:
    """Return the names of sockets and pipes, which are not copied."""
    copied = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK
    return [each for each in names if stat.S_IFMT(Path(folder, each).lstat().st_mode) not in copied]
