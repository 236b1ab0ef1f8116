"""A supervisor's access to its script's process: start it, read its reports and its state, and end it.

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
from distlab.tools.check.start.fork_servers import FilesToSend, ForkServer
from distlab.tools.check.start.script import Ends, Job
from distlab.tools.check.watch.reporter import now

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


class ProcessState(NamedTuple):
    """The kernel's view of the script's process: its state, its threads' CPU seconds, and the seconds in which its main
    thread was runnable without a core."""

    state: str
    cpu_s: float
    peak_bytes: int
    starved_s: float = 0.0


class Stacks:
    """Requests stacks from a process, by our ends of its pipes; `get_state` returns its state."""

    def __init__(self, process: int, requests: int, stacks: int, get_state: Callable[[], ProcessState | None]) -> None:
        self._process, self._requests, self._stacks, self._get_state = process, requests, stacks, get_state
        self._unanswered = False
        os.set_blocking(stacks, False)

    def request(self) -> dict[int, list[Frame]]:
        """Return the stack of each thread by its number, innermost frame first; empty if none arrived."""
        self._read()  # late answers to an earlier request
        if not self._unanswered:
            with suppress(OSError):  # it has exited
                os.write(self._requests, b"?")
                self._unanswered = True
        text = self._await_answer()
        if not text and not self._unread() and self._lock_is_held():
            with suppress(ProcessLookupError):
                os.kill(self._process, script.STACKS)
            text = self._await_answer()
        return parsed(text)

    def _unread(self) -> int:
        """Return the bytes of our request that were not read: the process is stopped, or had no core."""
        return int(struct.unpack("i", fcntl.ioctl(self._requests, termios.FIONREAD, struct.pack("i", 0)))[0])

    def _lock_is_held(self) -> bool:
        """Return whether the answering thread gets no GIL although its holder sleeps, or has had a core."""
        before, threads = self._get_state(), threads_of(self._process)
        ready, _, _ = select.select([self._stacks], [], [], STACK_S)
        after, now_threads = self._get_state(), threads_of(self._process)
        if ready or before is None or after is None or now_threads.waits - threads.waits < WAITS:
            return False
        return not threads.runnable | now_threads.runnable or after.cpu_s - before.cpu_s > HELD_CPU_S

    def _await_answer(self) -> str:
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
    """Return them from the kernel (proc(5)); none for a process that has exited."""
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


class ScriptChannel:
    """One watched process, with our ends of its pipes."""

    def __init__(self, process: BaseProcess, ends: Ends) -> None:
        self.process, self._ends = process, ends
        self._partial_line = b""
        self.peak_bytes = 0
        os.set_blocking(ends.reports, False)
        self._stacks = Stacks(process.pid or 0, ends.requests, ends.stacks, self.state)

    def close(self) -> None:
        """Close our ends of the pipes of a process that has exited."""
        self._ends.close()

    def begin(self, variables: dict[str, str]) -> None:
        os.write(self._ends.gate, "\n".join(f"{name}={value}" for name, value in variables.items()).encode())

    def receive(self, for_s: float) -> list[bytes]:
        """Return the lines reported meanwhile, or earlier if the process ends.

        It does not return at each line: a supervisor that wakes each time takes cores from the script, and made a step
        of fully_shard on 4 ranks and two cores 1.3 times as long.
        """
        if self.process.exitcode is None:
            wait([self.process.sentinel], for_s)
        else:
            time.sleep(for_s)
        try:
            data = os.read(self._ends.reports, READ_BYTES)
        except BlockingIOError:
            data = b""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return lines

    def state(self) -> ProcessState | None:
        """Return the state of the process; None once it has exited."""
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
        return ProcessState(fields[0], cpu_s, self.peak_bytes, self.starved_s())

    def starved_s(self) -> float:
        """Return the seconds so far in which its main thread was runnable without a core (proc(5), schedstat); 0 if the
        kernel does not count them."""
        with suppress(OSError, IndexError, ValueError):
            return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / NANOSECONDS
        return 0.0

    def stacks(self) -> dict[int, list[Frame]]:
        """Return the Python stack of each thread by its number, innermost frame first; empty if none arrived."""
        return self._stacks.request()

    def release(self, at_most_s: float) -> None:
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
    reports, stacks, requests, gate = (os.pipe() for _ in Ends._fields)
    fcntl.fcntl(reports[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return Ends(reports[0], stacks[0], requests[1], gate[1]), Ends(reports[1], stacks[1], requests[0], gate[0])


def fork_script(job: Job, server: ForkServer | None) -> ScriptChannel:
    """Return a script's process, forked by the server, or without one from this process before it has other threads."""
    ours, theirs = pipes()
    process: BaseProcess
    if server is None:
        process = CONTEXT.Process(target=script.run_forked, args=(job, theirs, ours, os.getpid()), name="MainProcess")
        process.start()
    else:
        process = server.start_process(script.run_served, (job, FilesToSend(*theirs, 0, 1, 2)), "MainProcess")
    theirs.close()
    return ScriptChannel(process, ours)


# Other variables that torchrun sets for each rank of a job on one node; its store is not opened here.
OF_TORCHRUN = {
    "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": 0,
    "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
}  # fmt: skip


def begin_all(channels: Sequence[ScriptChannel], folder: Path, proving: Callable[[int], str], **more: Path) -> None:
    """Let the processes of a script begin in `folder`, one per rank, with `proving(rank)` and `more` as variables."""
    port, key, size = free_port(), secrets.token_hex(32), len(channels)
    for rank, channel in enumerate(channels):
        variables = OF_TORCHRUN | {
            "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "distlab", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            script.STORE_KEY: key, script.PROVING: proving(rank), "DISTLAB_FOLDER": folder, **more,
        }  # fmt: skip
        channel.begin({name: str(value) for name, value in variables.items()})


# A supervisor's input from a process: its reports, and its state when it reports nothing.

STATE_S = 0.5  # between two readings of the process's state
SILENT_S = 0.6  # after so long without a report its stacks are read
STACKS_AGAIN_S = 1.0
READ_S = 0.05  # from all processes of a script


class ScriptMonitor:
    """Input from one process; its observed state is a line like its reports."""

    def __init__(self, channel: ScriptChannel) -> None:
        self.channel = channel
        self._received_at = now()
        self._state_at = self._stacks_at = 0.0
        self._exit_reported = False

    def lines(self, at_most_s: float) -> list[bytes]:
        """Return the lines reported within `at_most_s`, and the process's state."""
        lines = self.channel.receive(at_most_s)
        time_s = now()
        if lines:
            self._received_at = time_s
        if time_s - self._state_at > STATE_S:
            self._state_at = time_s
            state = self.channel.state()
            if state is not None:
                lines.append(json.dumps(["look", *state, time_s]).encode())
        silent = time_s - self._received_at > SILENT_S
        if silent and time_s - self._stacks_at > STACKS_AGAIN_S and self.channel.process.exitcode is None:
            self._stacks_at = time_s
            stacks = self.channel.stacks()
            lines.append(json.dumps(["stacks", {str(thread): frames for thread, frames in stacks.items()}]).encode())
        if self.channel.process.exitcode is not None and not self._exit_reported and not lines:
            self._exit_reported = True
            lines.append(json.dumps(["gone", self.channel.process.exitcode]).encode())
        return lines


def poll(channels: Sequence[ScriptChannel], coordinator: Coordinator) -> Iterator[None]:
    """Pass the reports of all of them to the coordinator until all have ended or it knows enough; yields regularly."""
    monitors = [ScriptMonitor(each) for each in channels]
    while not coordinator.over and any(state.exit_code is None for state in coordinator.states):
        for rank, each in enumerate(monitors):
            coordinator.receive(rank, each.lines(READ_S / len(monitors)), now())
        coordinator.evaluate(now())
        yield
