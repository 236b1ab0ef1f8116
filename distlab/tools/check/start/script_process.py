"""A supervisor's access to its script's process: start it, read its reports, look at its state, and end it.

Nothing here waits for the script's interpreter, which may be stuck in C++ with the GIL: its state and CPU time come
from the kernel (proc(5)), and its Python stacks when it can send them.
"""

import fcntl
import json
import os
import re
import secrets
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from distlab.lab.cluster.launch import CONTEXT, free_port
from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.check.judge.rank_state import Frame
from distlab.tools.check.start import script
from distlab.tools.check.start.fork_servers import ForkServer, TravellingFiles
from distlab.tools.check.start.script import Ends, Job
from distlab.tools.check.watch.telling import now

TICKS = os.sysconf("SC_CLK_TCK")
READ_BYTES = PIPE_BYTES = 1 << 20  # some 15,000 calls between two reads
KILLED_S = 1.0  # until the kernel has removed a killed process
NANOSECONDS = 1e9


# Python stacks of a watched process, without harming it.
#
# A separate thread answers, with the GIL, when no stack changes. faulthandler's signal needs no GIL and reads frames in
# any state: in Python 3.11 it killed a process that called functions once in some thousand signals
# (python/cpython#116008), and once a script's rank in our own tests. So the signal is only for an interpreter whose GIL
# is held in C, where no frame changes: the request was read, and for STACK_S no thread got the GIL although its holder
# slept or had a core. On a busy machine the answering thread may have the GIL and no core, or the GIL's holder may wait
# for a core while the main thread sleeps: neither gets the signal.

STACK_S = 0.5  # from a request to its answer; nothing else is done meanwhile
WAITS = 3  # for the GIL, of 5 ms each, after which the answering thread had a core but no GIL
HELD_CPU_S = 0.05  # of a process in which no other thread gets the GIL: ten switch intervals
FRAME = r'File "([^"]*)", line (\d+) in (.*)'


class Look(NamedTuple):
    """The kernel's view of the script's process: its state, its threads' CPU seconds, and the seconds in which its main
    thread was runnable without a core."""

    state: str
    cpu_s: float
    peak_bytes: int
    starved_s: float = 0.0


class Stacks:
    """Requests stacks from a process, by our ends of its pipes; `look` returns its state."""

    def __init__(self, process: int, asked: int, stacks: int, look: Callable[[], Look | None]) -> None:
        self._process, self._asked, self._stacks, self._look = process, asked, stacks, look
        self._unanswered = False
        os.set_blocking(stacks, False)

    def taken(self) -> dict[int, list[Frame]]:
        """Return the stack of each thread by its number, innermost frame first; empty if none came."""
        self._read()  # late answers to an earlier request
        if not self._unanswered:
            with suppress(OSError):  # it has gone
                os.write(self._asked, b"?")
                self._unanswered = True
        text = self._come()
        if not text and not self._unread() and self._lock_is_held():
            with suppress(ProcessLookupError):
                os.kill(self._process, script.STACKS)
            text = self._come()
        return parsed(text)

    def _unread(self) -> int:
        """Return the bytes of our request that were not read: the process is stopped, or had no core."""
        return int(struct.unpack("i", fcntl.ioctl(self._asked, termios.FIONREAD, struct.pack("i", 0)))[0])

    def _lock_is_held(self) -> bool:
        """Return whether the answering thread gets no GIL although its holder sleeps, or has had a core."""
        before, threads = self._look(), threads_of(self._process)
        ready, _, _ = select.select([self._stacks], [], [], STACK_S)
        after, now_threads = self._look(), threads_of(self._process)
        if ready or before is None or after is None or now_threads.waits - threads.waits < WAITS:
            return False
        return not threads.runnable | now_threads.runnable or after.cpu_s - before.cpu_s > HELD_CPU_S

    def _come(self) -> str:
        deadline, text = time.monotonic() + STACK_S, ""
        while time.monotonic() < deadline and not text.endswith(script.END):
            ready, _, _ = select.select([self._stacks], [], [], 0.05)
            text += self._read() if ready else (script.END if text else "")
            text = text.lstrip()  # the end of an earlier answer, which may come after its text
        return text

    def _read(self) -> str:
        try:
            text = os.read(self._stacks, READ_BYTES).decode(errors="replace")
        except BlockingIOError:
            return ""
        self._unanswered = self._unanswered and not text.endswith(script.END)
        return text


class Threads(NamedTuple):
    """A process's threads: how often the answering one waited, and which others have or need a core."""

    waits: int
    runnable: frozenset[str]


def threads_of(process: int) -> Threads:
    """Return them from the kernel (proc(5)); none for a process that has gone."""
    waits, runnable = 0, set()
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            status = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
            name = status["Name"].strip()
            if name == script.ANSWERING:
                waits = int(status["voluntary_ctxt_switches"])
            elif status["State"].split()[0] == "R":
                runnable.add(name)
    return Threads(waits, frozenset(runnable))


def parsed(text: str) -> dict[int, list[Frame]]:
    """Return the stacks in this text of faulthandler's form, without the answering thread's."""
    found: dict[int, list[Frame]] = {}
    for part in re.split(r"(?=^(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE):
        head = re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", part)
        if head:
            frames = [Frame(file, int(line), name) for file, line, name in re.findall(FRAME, part)]
            if not frames or (frames[-1].file, frames[-1].function) != (script.__file__, "answering"):
                found[int(head[1], 16)] = frames
    return found


class Bedside:
    """One watched process, with our ends of its pipes."""

    def __init__(self, process: BaseProcess, ends: Ends) -> None:
        self.process, self._ends = process, ends
        self._rest = b""
        self.peak_bytes = 0
        os.set_blocking(ends.told, False)
        self._stacks = Stacks(process.pid or 0, ends.asked, ends.stacks, self.look)

    def close(self) -> None:
        """Close our ends of the pipes of a process that has gone."""
        self._ends.close()

    def begin(self, variables: dict[str, str]) -> None:
        os.write(self._ends.gate, "\n".join(f"{name}={value}" for name, value in variables.items()).encode())

    def hear(self, for_s: float) -> list[bytes]:
        """Return the lines reported meanwhile, or earlier if the process ends.

        It does not return at each line: a supervisor that wakes each time takes cores from the script, and made a step
        of fully_shard on 4 ranks and two cores 1.3 times as long.
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
        """Return the state of the process; None once it has gone."""
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
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
        return Look(fields[0], cpu_s, self.peak_bytes, self.starved_s())

    def starved_s(self) -> float:
        """Return the seconds so far in which its main thread was runnable without a core (proc(5), schedstat); 0 if the
        kernel does not count them."""
        with suppress(OSError, IndexError, ValueError):
            return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / NANOSECONDS
        return 0.0

    def stacks(self) -> dict[int, list[Frame]]:
        """Return the Python stack of each thread by its number, innermost frame first; empty if none came."""
        return self._stacks.taken()

    def let_go(self, at_most_s: float) -> None:
        """Let an ended script's process end; after the time, kill it and processes that it started."""
        if at_most_s > 0:
            with suppress(OSError):
                os.write(self._ends.gate, b".")
            self.process.join(at_most_s)
        self.kill()

    def kill(self) -> None:
        if self.process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(KILLED_S)


def pipes() -> tuple[Ends, Ends]:
    """Return our ends of the four pipes, and the watched process's."""
    told, stacks, asked, gate = (os.pipe() for _ in Ends._fields)
    fcntl.fcntl(told[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return Ends(told[0], stacks[0], asked[1], gate[1]), Ends(told[1], stacks[1], asked[0], gate[0])


def started(job: Job, server: ForkServer | None) -> Bedside:
    """Return a script's process, forked by the server, or without one from this process before it has other threads."""
    ours, theirs = pipes()
    process: BaseProcess
    if server is None:
        process = CONTEXT.Process(target=script.run_forked, args=(job, theirs, ours, os.getpid()), name="MainProcess")
        process.start()
    else:
        process = server.started(script.run_served, (job, TravellingFiles(*theirs, 0, 1, 2)), "MainProcess")
    theirs.close()
    return Bedside(process, ours)


# Other variables that torchrun sets for each rank of a job on one node; its store is not opened here.
OF_TORCHRUN = {
    "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": 0,
    "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
}  # fmt: skip


def begin_all(bedsides: Sequence[Bedside], folder: Path, told: Callable[[int], str], **more: Path) -> None:
    """Let the processes of a script begin in `folder`, a rank each, with what each is `told` and `more` variables."""
    port, key, size = free_port(), secrets.token_hex(32), len(bedsides)
    for rank, bedside in enumerate(bedsides):
        variables = OF_TORCHRUN | {
            "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "distlab", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            script.STORE_KEY: key, script.PROVING: told(rank), "DISTLAB_FOLDER": folder, **more,
        }  # fmt: skip
        bedside.begin({name: str(value) for name, value in variables.items()})


# A supervisor's input from a process: its reports, and its state when it reports nothing.

LOOK_S = 0.5  # between two looks at the process
SILENT_S = 0.6  # after so long without a report its stacks are read
STACKS_AGAIN_S = 1.0
LISTEN_S = 0.05  # to all of a script's


class Hearing:
    """Input from one process; its observed state is a line like its reports."""

    def __init__(self, bedside: Bedside) -> None:
        self.bedside = bedside
        self._heard_at = now()
        self._looked_at = self._stacked_at = 0.0
        self._gone_told = False

    def lines(self, at_most_s: float) -> list[bytes]:
        """Return the lines reported within so many seconds, and the observed state."""
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


def heard(bedsides: Sequence[Bedside], doctor: Coordinator) -> Iterator[None]:
    """Let a doctor hear all of them, and look, again and again until all have ended or it knows enough."""
    hearings = [Hearing(each) for each in bedsides]
    while not doctor.over and any(case.exit_code is None for case in doctor.states):
        for rank, each in enumerate(hearings):
            doctor.receive(rank, each.lines(LISTEN_S / len(hearings)), now())
        doctor.evaluate(now())
        yield
