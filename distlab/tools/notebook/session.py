"""The ranks of a notebook, in its kernel: each runs the cell in names of its own, and a doctor watches.

Ranks outlive what goes wrong. Those that wait for each other are called back (rank.py), and all meet in a new process
group; a rank that does not come back within BACK_S, or whose process is gone, is made anew, which is said, since its
names are gone with it.
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

from distlab.tools.check.judge.coordinator import Doctor
from distlab.tools.notebook.rank import Cell, Cells, Ended
from distlab.tools.ranks.pool import Outcome, WarmRanks, Watching

NEVER_S = 86_400.0  # a cell may take as long as it likes: the doctor ends what hangs
BACK_S = 1.5  # for a rank to come back from a call that has ended
MOST = 64  # ranks, of one machine


@dataclass
class Result:
    """What became of a cell, by rank."""

    file: str
    outcome: Outcome
    interrupted: bool
    made_anew: list[int] = field(default_factory=list)  # ranks that have lost their names
    doctor: Doctor | None = None
    told: list[list[bytes]] = field(default_factory=list)  # the lines of each rank, where they were asked for

    @property
    def ended(self) -> dict[int, Ended]:
        return {rank: each for rank, each in self.outcome.ended.items() if isinstance(each, Ended)}


class Session(WarmRanks):
    """The ranks; `start` before `run`."""

    def __init__(self) -> None:
        self._cells = Path(tempfile.mkdtemp(prefix="distlab-cells-"))
        super().__init__(Cells, str(Path.cwd()), str(self._cells), [Cells.__module__], apart=True)
        self.names: dict[int, list[str]] = {}  # by rank, after its last cell; of a rank made anew none

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def start(self, world_size: int) -> None:
        """New ranks, in the place of those that are there; raises RuntimeError if one does not start."""
        self.kill()
        self.names.clear()
        self._root = str(Path.cwd())
        self.have(world_size)
        self._meet()

    def _meet(self) -> None:
        """Have all ranks make a new process group."""
        group = self.next_group(self.world_size, NEVER_S)
        for rank in self._ranks:
            rank.control.send(group)
        for rank in self._ranks:
            self.hear(rank, "meet the others")

    def run_cell(self, number: int, source: str, only: Sequence[int] = (), *, measured: bool = False) -> Result:
        """The cell `number` on the ranks `only`, or on all; returns once all have ended, or something is wrong."""
        file = self._cells / f"cell_{number}.py"
        file.write_text(source)
        lost = [rank for rank, (_, nbytes) in enumerate(self.memory_bytes()) if not nbytes]
        if lost:
            self._mend(lost)
        watching, interrupted = Watching(self._ranks, math.inf, keeps=True), False
        try:
            for rank, each in enumerate(self._ranks):
                taking_part = not only or rank in only
                each.begin(Cell(str(file), source if taking_part else "", measured))
            outcome = watching.until_the_end()
        except KeyboardInterrupt:
            interrupted = True
            outcome = watching.outcome("interrupted")
        result = Result(str(file), outcome, interrupted, lost, watching.doctor, watching.told)
        self.names.update({rank: each.names for rank, each in result.ended.items()})
        if outcome.is_bad or interrupted:
            result.made_anew = sorted({*lost, *self._recover(outcome)})
        return result

    def _recover(self, outcome: Outcome) -> list[int]:
        """Call back who is still in the cell, make anew who is gone, and have all meet; returns the ranks made anew."""
        away = {
            rank for rank, each in enumerate(self._ranks)
            if rank not in outcome.ended and each.bedside.process.exitcode is None
        }  # fmt: skip
        for rank in away:
            self._ranks[rank].call_back()
        deadline = time.monotonic() + BACK_S
        while away and (left_s := deadline - time.monotonic()) > 0:
            controls = {self._ranks[rank].control: rank for rank in away}
            for each in wait(list(controls), left_s):
                assert isinstance(each, Connection)
                away.discard(rank := controls[each])
                with suppress(EOFError, OSError):  # its process is gone, which is seen below
                    self.names[rank] = each.recv().names
        gone = {rank for rank, (_, nbytes) in enumerate(self.memory_bytes()) if not nbytes}
        anew = sorted(away | gone)
        self._mend(anew)
        return anew

    def _mend(self, anew: Sequence[int]) -> None:
        for rank in anew:
            self.names.pop(rank, None)
            self.replace(rank)
        self._meet()

    def memory_bytes(self) -> list[tuple[int, int]]:
        """Of each rank its process, and what that has in memory; 0 where it is gone."""
        found = []
        for rank in self._ranks:
            pid, nbytes = rank.bedside.process.pid or 0, 0
            with suppress(OSError):
                nbytes = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found.append((pid, nbytes))
        return found

    def close(self) -> None:
        """End all ranks; nothing of them is left."""
        super().close()
        shutil.rmtree(self._cells, ignore_errors=True)
