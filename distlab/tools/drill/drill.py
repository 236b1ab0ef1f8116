"""Test one script from its options to the verdict: the whole run twice, then each fault and the resumes after it.

By default a rank is killed at a step after the first checkpoint, and a fault in a save comes in the middle of a file of
a later checkpoint. The whole run shows where these are.
"""

import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.lab.config import ConfigError
from distlab.lab.report.table import Table, log_line, wrapped
from distlab.lab.report.units import counted
from distlab.tools.check.start.script import Job
from distlab.tools.drill import FAULTS
from distlab.tools.drill.recording import DISK, KILL, TERM, Fault
from distlab.tools.drill.runs import Ranks, RecordedRun
from distlab.tools.drill.verdict import Row, WholeRun, judged, trained, whole_run_of

SAVE_FAULTS = {
    "kill@save": (KILL, "kill @ save"),
    "term@save": (TERM, "SIGTERM @ save"),
    "disk@save": (DISK, "full disk @ save"),
}
TITLES = ("run", "ranks", "steps", "weights", "samples", "lost", "twice", "from")


class Options(NamedTuple):
    """The options before the script."""

    kill: tuple[int, int] | None = None  # rank, and the step in which it is killed, from 1
    resume: Sequence[int] = ()  # numbers of ranks; empty: as many as before
    faults: Sequence[str] = FAULTS
    resume_words: Sequence[str] = ()
    state: Path | None = None
    as_json: bool = False


class Failed(Exception):
    """The script failed before there was anything to resume."""


class Drill:
    """All runs of one script."""

    def __init__(self, options: Options, job: Job, size: int, ranks: Ranks) -> None:
        self._options, self._job, self._size, self._ranks = options, job, size, ranks

    def rows(self) -> Iterator[Row]:
        """Yield the whole run's row, and one per resume."""
        whole = self._run_whole()
        last = whole.run.num_steps
        repeats = "" if not whole.noise else f"its second run is {whole.noise:.0e} off"
        total = trained(whole.run, range(last)).total()
        yield Row("whole", self._size, last, repeats or "-", total, 0, 0, "-", "")
        if not any(True for _ in whole.run.all("saves")):
            raise Failed(f"the script writes no file in its {last} steps: there is nothing to resume from")
        target = largest_file(whole.run)
        save_faults = [each for each in self._options.faults if each in SAVE_FAULTS]
        if target is None and save_faults:
            what = f"no file that a step writes still exists one step later, so {', '.join(save_faults)} cannot be made"
            raise ConfigError([f"{what}: allowed is --faults kill"])
        for fault in self._options.faults:
            if fault == "kill":
                before = self._run_with("kill", self._kill_fault(whole))
                for size in self._options.resume or (self._size,):
                    yield self._resume(f"kill, resume {size}", whole, before, size, "kill")
            elif target is not None:
                kind, name = SAVE_FAULTS[fault]
                before = self._run_with(name, target._replace(kind=kind))
                yield self._resume(name, whole, before, self._size, name, target.step)

    def _run_whole(self) -> WholeRun:
        runs = []
        for name in ("whole", "again"):
            work = self._ranks.prepare(name)
            runs.append(self._ranks.run(name, work, self._size, self._arguments(work)))
            outside = next((each for _, each in runs[-1].all("outside")), None)
            if outside is not None:
                what = f"{outside['at']} writes {outside['outside']}, which is not in the copy of the working folder"
                raise ConfigError([f"{what}: name its folder with --state"])
            if runs[-1].failed:
                raise Failed(f"the whole run failed: {runs[-1].failed}")
            if not runs[-1].num_steps:
                raise ConfigError(["no optimizer took a step in the whole run"])
        return whole_run_of(*runs)

    def _arguments(self, work: Path, more: Sequence[str] = ()) -> list[str]:
        """Return the script's arguments, in which copied folders are replaced by their copies."""
        found = [*self._job.words, *more]
        state = self._options.state
        if state is not None and not state.is_relative_to(self._job.folder):
            found = [each.replace(str(state), str(work / "state")) for each in found]
        return [each.replace(f"{self._job.folder}/", f"{work}/") for each in found]

    def _kill_fault(self, whole: WholeRun) -> Fault:
        last = whole.run.num_steps
        if self._options.kill is not None:
            rank, step = self._options.kill
            if step > last:
                raise ConfigError([f"--kill names step {step}, but the whole run has only {last} steps"])
            return Fault(KILL, rank, step - 1)
        saved = sorted({each["after"] for _, each in whole.run.all("saves")})
        middle = [each for each in saved if each <= last // 2] or saved
        return Fault(KILL, self._size - 1, min(middle[-1], last - 1))

    def _run_with(self, name: str, fault: Fault) -> RecordedRun:
        work = self._ranks.prepare(name)
        return self._ranks.run(name, work, self._size, self._arguments(work), fault)

    def _resume(self, name: str, whole: WholeRun, before: RecordedRun, size: int, failed: str, saving: int = 0) -> Row:
        folder = f"{failed}, {size}"
        work = self._ranks.prepare(folder, self._ranks.work_of(failed))
        words = self._arguments(work, self._options.resume_words)
        after = self._ranks.run(folder, work, size, words)
        if not before.hit and not before.ended:
            return Row(name, size, 0, "-", 0, 0, 0, "-", f"the run failed before the fault: {before.failed}")
        note = f"step {saving} half written" if saving and before.hit else ""
        return judged(name, whole, before, after, note)


def largest_file(run: RecordedRun) -> Fault | None:
    """Return a fault in a file: the largest one that a checkpoint after the first writes."""
    sized = [(rank, each) for rank, each in run.all("size") if each["size"]]
    steps = sorted({each["after"] for _, each in sized})
    if not steps:
        return None
    step = steps[min(len(steps) - 1, max(1, len(steps) // 2))]
    rank, most = max((each for each in sized if each[1]["after"] == step), key=lambda each: int(each[1]["size"]))
    return Fault(KILL, rank, step, most["file"], max(1, most["size"] // 2))


def drill(options: Options, job: Job, size: int, bound_s: float) -> int:
    """Run the test and print its table; returns the exit code."""
    importlib.import_module("torch._dynamo")  # as DistributedDataParallel does: once, and not in each rank, 1.5 s each
    top = Path(tempfile.mkdtemp(prefix="distlab-drill-")).resolve()
    ranks = Ranks(job, top, options.state, bound_s)
    rows: list[Row] = []
    try:
        for row in Drill(options, job, size, ranks).rows():
            rows.append(row)
    except Failed as error:
        result = {"verdict": "fail", "why": str(error), "runs": [row._asdict() for row in rows]}
        print(json.dumps(result) if options.as_json else "\n".join(wrapped("FAIL", str(error))), flush=True)
        return 1
    finally:
        shutil.rmtree(top, ignore_errors=True)
    print_rows(rows, as_json=options.as_json)
    return 1 if any(row.why for row in rows) else 0


def print_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    failed = [row for row in rows if row.why]
    verdict = f"{len(rows) - 1 - len(failed)} of {counted(len(rows) - 1, 'resumes')} passed"
    if as_json:
        result = {"verdict": "fail" if failed else "pass", "runs": [row._asdict() for row in rows]}
        print(json.dumps(result), flush=True)
        return
    cells = [[row.run, row.ranks, row.steps, row.weights, row.samples, row.lost, row.twice, row.begins] for row in rows]
    lines = Table.of(TITLES, cells).text()
    for row in failed:
        lines += wrapped("why", f"{row.run}: {row.why}")
        lines += [line for each in row.by_rank for line in wrapped("", each)]
    print("\n".join([*lines, log_line("FAIL" if failed else "PASS", verdict)]), flush=True)
