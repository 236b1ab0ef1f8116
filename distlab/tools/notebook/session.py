"""The ranks of a notebook, in its kernel: each runs the cell in its own namespace, watched by a coordinator.

Ranks survive failures. Those that wait for each other are interrupted (rank.py), and all join a new process group. A
rank that does not return within RETURN_S, or whose process has exited, is restarted, which is reported: it has lost its
names.
"""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.notebook.rank import Cell, Cells, RankResult
from distlab.tools.ranks.pool import Outcome, TaskMonitor, WarmRanks

NEVER_S = 86_400.0  # a cell has no time limit: the coordinator ends hangs
RETURN_S = 1.5  # for a rank to return from an interrupted call
MOST = 64  # ranks, of one machine


@dataclass
class Result:
    """The outcome of a cell, by rank."""

    file: str
    outcome: Outcome
    interrupted: bool
    restarted: list[int] = field(default_factory=list)  # ranks that have lost their names
    coordinator: Coordinator | None = None
    reports: list[list[bytes]] = field(default_factory=list)  # each rank's reports, if requested

    @property
    def ended(self) -> dict[int, RankResult]:
        return {rank: each for rank, each in self.outcome.ended.items() if isinstance(each, RankResult)}


class Session(WarmRanks):
    """The ranks; `start` before `run_cell`."""

    def __init__(self) -> None:
        self._cells = Path(tempfile.mkdtemp(prefix="distlab-cells-"))
        super().__init__(Cells, str(Path.cwd()), str(self._cells), [Cells.__module__], own_interpreters=True)
        self.names: dict[int, list[str]] = {}  # by rank, after its last cell; none for a restarted rank

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def start(self, world_size: int) -> None:
        """Start new ranks in place of existing ones; raises RuntimeError if one does not start."""
        self.kill()
        self.names.clear()
        self._root = str(Path.cwd())
        self.ensure(world_size)
        self._join_group()

    def _join_group(self) -> None:
        """Make all ranks join a new process group."""
        group = self.next_group(self.world_size, NEVER_S)
        for rank in self._ranks:
            rank.control.send(group)
        for rank in self._ranks:
            self.await_rank(rank, "join the group")

    def run_cell(self, number: int, source: str, only: Sequence[int] = (), *, measured: bool = False) -> Result:
        """Run cell `number` on the ranks `only`, or on all; returns when all have ended or one failed."""
        file = self._cells / f"cell_{number}.py"
        file.write_text(source)
        lost = [rank for rank, (_, nbytes) in enumerate(self.memory_bytes()) if not nbytes]
        if lost:
            self._restart(lost)
        monitor, interrupted = TaskMonitor(self._ranks, math.inf, keep_reports=True), False
        try:
            for rank, each in enumerate(self._ranks):
                taking_part = not only or rank in only
                each.begin(Cell(str(file), source if taking_part else "", measured))
            outcome = monitor.follow_to_end()
        except KeyboardInterrupt:
            interrupted = True
            outcome = monitor.outcome("interrupted")
        result = Result(str(file), outcome, interrupted, lost, monitor.coordinator, monitor.reports)
        self.names.update({rank: each.names for rank, each in result.ended.items()})
        if outcome.is_bad or interrupted:
            result.restarted = sorted({*lost, *self._recover(outcome)})
        return result

    def _recover(self, outcome: Outcome) -> list[int]:
        """Interrupt ranks still in the cell, restart dead ones, and regroup all; returns the restarted ranks."""
        busy = {
            rank for rank, each in enumerate(self._ranks)
            if rank not in outcome.ended and each.channel.process.exitcode is None
        }  # fmt: skip
        for rank in busy:
            self._ranks[rank].interrupt()
        deadline = time.monotonic() + RETURN_S
        while busy and (left_s := deadline - time.monotonic()) > 0:
            controls = {self._ranks[rank].control: rank for rank in busy}
            for each in wait(list(controls), left_s):
                assert isinstance(each, Connection)
                busy.discard(rank := controls[each])
                with suppress(EOFError, OSError):  # its process has exited, which is detected below
                    self.names[rank] = each.recv().names
        exited = {rank for rank, (_, nbytes) in enumerate(self.memory_bytes()) if not nbytes}
        restarted = sorted(busy | exited)
        self._restart(restarted)
        return restarted

    def _restart(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.names.pop(rank, None)
            self.replace(rank)
        self._join_group()

    def memory_bytes(self) -> list[tuple[int, int]]:
        """Return each rank's process and its memory; 0 if it has exited."""
        found = []
        for rank in self._ranks:
            pid, nbytes = rank.channel.process.pid or 0, 0
            with suppress(OSError):
                nbytes = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found.append((pid, nbytes))
        return found

    def close(self) -> None:
        """End all ranks and free their resources."""
        super().close()
        shutil.rmtree(self._cells, ignore_errors=True)
