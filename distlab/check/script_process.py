"""A rank's doctor and its script: starts the process, hears what it tells, looks how it is, and ends it.

Nothing here waits for the script's interpreter, which may be stuck in C++ with its lock held: its state and its
processor time are the kernel's words (proc(5)), and its Python stacks come where it can tell them (script.py).
"""

import fcntl
import json
import os
import re
import signal
import time
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from distlab.check import script
from distlab.check.recorder import now
from distlab.check.script import Ends, Frame, Job, Look, Stacks
from distlab.cluster.launch import CONTEXT

TICKS = os.sysconf("SC_CLK_TCK")
READ_BYTES = PIPE_BYTES = 1 << 20  # some 15,000 calls between two looks
KILLED_S = 1.0  # until the kernel has taken a killed process away
NANOSECONDS = 1e9


class Bedside:
    """One process under watch, with our ends of its pipes."""

    def __init__(self, process: BaseProcess, ends: Ends) -> None:
        self.process, self._ends = process, ends
        self._rest = b""
        self.peak_bytes = 0
        os.set_blocking(ends.told, False)
        self._stacks = Stacks(process.pid or 0, ends.asked, ends.stacks, self.look)

    def close(self) -> None:
        """Our ends of the pipes, of a process that is gone."""
        self._ends.close()

    def begin(self, variables: dict[str, str]) -> None:
        """Let the script begin, with these variables."""
        os.write(self._ends.gate, "\n".join(f"{name}={value}" for name, value in variables.items()).encode())

    def hear(self, for_s: float) -> list[bytes]:
        """The lines that were told meanwhile; sooner where the process ends.

        Not as they come: a doctor that wakes with each line takes its cores from the script, and made a step of
        fully_shard on 4 ranks and two cores 1.3 times as long.
        """
        if self.process.exitcode is None:
            wait([self.process.sentinel], for_s)
        else:
            time.sleep(for_s)
        try:
            data = os.read(self._ends.told, READ_BYTES)
        except BlockingIOError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def look(self) -> Look | None:
        """How the process is; None once it is gone."""
        if self.process.exitcode is not None:
            return None
        place = Path(f"/proc/{self.process.pid}")
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            status = (place / "status").read_text()
        except OSError:
            return None
        peak = re.search(r"VmHWM:\s*(\d+) kB", status)
        self.peak_bytes = max(self.peak_bytes, int(peak[1]) * 1024 if peak else 0)
        return Look(fields[0], (int(fields[11]) + int(fields[12])) / TICKS, self.peak_bytes)

    def starved_s(self) -> float:
        """Seconds so far in which its main thread could have run and had no core (proc(5), schedstat); 0 where the
        kernel does not count them."""
        with suppress(OSError, IndexError, ValueError):
            return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / NANOSECONDS
        return 0.0

    def stacks(self) -> dict[int, list[Frame]]:
        """The Python stack of each thread by its number, innermost frame first; empty where none came."""
        return self._stacks.taken()

    def let_go(self, at_most_s: float) -> None:
        """Let an ended script's process end; what is left of it and of what it started is killed after that."""
        if at_most_s > 0:
            with suppress(OSError):
                os.write(self._ends.gate, b".")
            self.process.join(at_most_s)
        self.kill()

    def kill(self) -> None:
        """End the process and all that it started."""
        if self.process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(KILLED_S)


def pipes() -> tuple[Ends, Ends]:
    """Our ends of the four pipes, and the watched process's."""
    told, stacks, asked, gate = (os.pipe() for _ in Ends._fields)
    fcntl.fcntl(told[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return Ends(told[0], stacks[0], asked[1], gate[1]), Ends(told[1], stacks[1], asked[0], gate[0])


def forked(job: Job) -> Bedside:
    """A script's process, forked from this one before it has any other thread."""
    ours, theirs = pipes()
    process = CONTEXT.Process(target=script.run, args=(job, theirs, ours, os.getpid()), name="MainProcess")
    process.start()
    theirs.close()
    return Bedside(process, ours)


def how_it_ended(exit_code: int) -> str:
    """In words that follow "rank 2 "."""
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"left by os._exit({exit_code})"


# What a doctor hears of a process: the lines that it tells, and how it is where it tells nothing.

LOOK_S = 0.5  # between two looks at the process
SILENT_S = 0.6  # after so long without a word its stacks are looked at
STACKS_AGAIN_S = 1.0


class Hearing:
    """Of one process; what is seen of it is a line like those that it tells."""

    def __init__(self, bedside: Bedside) -> None:
        self.bedside = bedside
        self._heard_at = now()
        self._looked_at = self._stacked_at = 0.0
        self._gone_told = False

    def lines(self, at_most_s: float) -> list[bytes]:
        """What was told within so many seconds, and seen."""
        lines = self.bedside.hear(at_most_s)
        time_s = now()
        if lines:
            self._heard_at = time_s
        if time_s - self._looked_at > LOOK_S:
            self._looked_at = time_s
            look = self.bedside.look()
            if look is not None:
                lines.append(json.dumps(["look", *look, time_s]).encode())
        silent = time_s - self._heard_at > SILENT_S
        if silent and time_s - self._stacked_at > STACKS_AGAIN_S and self.bedside.process.exitcode is None:
            self._stacked_at = time_s
            stacks = self.bedside.stacks()
            lines.append(json.dumps(["stacks", {str(thread): frames for thread, frames in stacks.items()}]).encode())
        if self.bedside.process.exitcode is not None and not self._gone_told and not lines:
            self._gone_told = True
            lines.append(json.dumps(["gone", self.bedside.process.exitcode]).encode())
        return lines
