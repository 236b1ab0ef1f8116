"""Run a script again on one rank, next to rank 0's supervisor: as the reference, and with reordered samples, which
shows the effect of rounding.

The processes are created with the ranks', before any thread exists, and wait; both run at once after the ranks, in a
separate folder with links to the script's neighbours.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from distlab.lab.config import Config
from distlab.lab.report.records import Record
from distlab.lab.report.table import wrapped
from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.check.judge.rank_state import Finding
from distlab.tools.check.start.fork_servers import ForkServer
from distlab.tools.check.start.script import Job
from distlab.tools.check.start.script_process import ScriptChannel, begin_all, fork_script, poll
from distlab.tools.prove.script_steps import ProofSettings
from distlab.tools.prove.script_verdict import ComparedRuns, compare_runs

FOLDER = "script"  # in the run's folder
ROLES = ("reference", "noise")
AT_LEAST_S, TIMES = 30.0, 4.0  # the reference's limit: seconds, or so many times the ranks' time


class ScriptOptions(NamedTuple):
    """The options before the file."""

    reference: int = 1  # its number of ranks
    double: bool = False
    words: tuple[str, ...] | None = None  # the reference's arguments, if they differ


class Reruns:
    """The reruns on rank 0; always `close` them."""

    def __init__(self, options: ScriptOptions, config: Config, job: Job, server: ForkServer | None) -> None:
        self._options, self._config, self._job = options, config, job
        words = job.words if options.words is None else options.words
        again = job._replace(words=words, reruns=None)
        self._worlds = {role: [fork_script(again, server) for _ in range(options.reference)] for role in ROLES}
        self._beside = [each.name for each in job.folder.iterdir()]
        self._began = time.monotonic()

    def _settings(self, folder: Path, role: str, rank: int) -> str:
        place = str((folder / FOLDER).resolve())
        size, options = self._config.world_size, self._options
        return json.dumps(ProofSettings(place, role, rank, size, options.double, options.reference)._asdict())

    def compare(
        self, folder: Path, coordinator: Coordinator, say: Callable[[str], None]
    ) -> tuple[list[Finding], list[Record]]:
        """Run the reference, and compare."""
        duration_s = time.monotonic() - self._began
        why_not = "" if coordinator.completed else "the run on all ranks did not finish"
        for role, channels in self._worlds.items() if not why_not else ():
            self._begin(folder, role, channels)
        for channels in self._worlds.values() if not why_not else ():
            why_not = why_not or self._until_the_end(channels, max(AT_LEAST_S, TIMES * duration_s))
        self.close()
        where = folder / FOLDER
        try:
            found: ComparedRuns = compare_runs(where, self._config.world_size, self._options.reference, why_not)
        except Exception as error:  # a bug of ours must not end the run, whose calls were checked
            found = ComparedRuns([("reference", f"not compared: {error!r}")], [], [])
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        for heading, text in found.notes:
            say("\n".join(wrapped(heading, text)))
        return found.findings, found.records

    def _begin(self, folder: Path, role: str, channels: Sequence[ScriptChannel]) -> None:
        scratch = folder / FOLDER / role / "beside"
        scratch.mkdir(parents=True)
        for name in self._beside:
            (scratch / name).symlink_to(self._job.folder.resolve() / name)
        begin_all(channels, scratch, partial(self._settings, folder, role))

    def _until_the_end(self, channels: Sequence[ScriptChannel], bound_s: float) -> str:
        """Return why it did not finish, or "" if it did."""
        coordinator = Coordinator(len(channels), self._job.hang_after_s, bound_s, lambda _: None)
        until = time.monotonic() + bound_s
        for _ in poll(channels, coordinator):
            if time.monotonic() > until:
                return f"the script had not finished after {bound_s:.0f} s"
        raised = [case.raised for case in coordinator.states if case.raised is not None]
        failed = [finding.sentence for finding in coordinator.findings if not coordinator.completed]
        return f"{raised[0].kind}: {raised[0].text} at {raised[0].place}" if raised else "".join(failed[:1])

    def close(self) -> None:
        for channels in self._worlds.values():
            for each in channels:
                each.kill()
        self._worlds = {}
