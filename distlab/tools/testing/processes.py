"""Warm ranks: processes that are forked once, run what comes, and are watched by a doctor in the process that has them.

Ranks are forked from fork servers, as many as the largest task so far has asked for, and stay for the next one. Who
hands them tasks says which: a test (pool.py), a function (warm_ranks.py), a cell of a notebook
(distlab/tools/notebook).
"""

import ctypes
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple

import torch

from distlab.lab.cluster.launch import refuse_too_few
from distlab.lab.config.user_code import heed_endings, raise_exited
from distlab.techniques.transport.handshake import listen
from distlab.techniques.transport.store_server import StoreServer
from distlab.tools.check.judge.coordinator import Doctor
from distlab.tools.check.judge.rank_state import END, HANG, MATCH, Finding
from distlab.tools.check.start.fork_servers import ForkServer, TravellingFiles, be_main_process, leave_to_others
from distlab.tools.check.start.script import PR_SET_PDEATHSIG, answer
from distlab.tools.check.start.script_process import Bedside, Hearing, pipes
from distlab.tools.check.watch.telling import now

LISTEN_S = 0.25
HANG_AFTER_S = 3.0  # without progress, until ranks that wait for each other are called hung
AT_ONCE_S = 0.02
LAST_S = 1.0
KEY_BYTES = 32
GATHER_S = 0.5  # what ranks have told is in a pipe of this process, and on no store


class Start(NamedTuple):
    """What a rank is told as it is forked."""

    rank: int
    port: int  # of the pool's store
    key: bytes  # that opens it
    root: str  # the folder that it stands in
    path: Sequence[str]  # sys.path
    files: Sequence[str]  # patterns of test files; of a notebook the folder of its cells


@dataclass(frozen=True)
class Ended:
    """How it ended on a rank: "passed", "failed" or "skipped", and the text."""

    outcome: str
    text: str = ""


def at_home(start: Start, files: Sequence[Any]) -> int:
    """Settle down in a new process that tells its stacks; where its lines go.

    `files` are the process's ends of its four pipes, and what it prints into.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    leave_to_others()
    be_main_process()
    os.setpgid(0, 0)  # so that what a test starts ends with it
    told, stacks, asked, _, output = (each.detach() for each in files)
    answer(asked, stacks)
    os.dup2(output, 1)
    os.dup2(1, 2)
    os.chdir(start.root)
    sys.path[:] = list(start.path)
    torch.set_num_threads(1)
    heed_endings(raise_exited)
    return int(told)


class WarmRank:
    """One rank of a pool; its process calls `serve(start, files, control)`."""

    def __init__(self, start: Start, server: ForkServer, serve: Callable[..., None]) -> None:
        ours, theirs = pipes()
        self.output: IO[bytes] = tempfile.TemporaryFile("ab+", buffering=0)  # noqa: SIM115  open as long as it lives
        self.control, other = Pipe()
        files = TravellingFiles(*theirs, self.output.fileno())
        process = server.started(serve, (start, files, other), f"rank {start.rank}")
        theirs.close()
        other.close()
        self.bedside = Bedside(process, ours)

    def begin(self, task: Any) -> None:
        self.output.truncate(0)
        while self.bedside.hear(0.0):  # what a rank tells that was called back is of the task before
            pass
        self.hearing = Hearing(self.bedside)
        self._starved_before_s = self.bedside.starved_s()
        self.control.send(task)

    def starved_s(self) -> float:
        """For how long the test could have gone on here and had no core."""
        return self.bedside.starved_s() - self._starved_before_s

    def printed(self) -> str:
        return os.pread(self.output.fileno(), 1 << 20, 0).decode(errors="replace")

    def kill(self) -> None:
        self.bedside.kill()
        self.bedside.close()
        self.control.close()
        self.output.close()


@dataclass
class Outcome:
    """What became of a test."""

    ended: dict[int, Ended]
    findings: list[Finding]
    printed: dict[int, str]
    lost: Mapping[int, str]  # ranks whose process was killed, and how
    late: str = ""  # why it was ended, where that is no finding
    rows: list[tuple[str, str]] = field(default_factory=list)  # where each rank was then

    @property
    def is_bad(self) -> bool:
        """Whether the test has failed, and its ranks are of no more use."""
        failed = any(each.outcome == "failed" for each in self.ended.values())
        return bool(self.late or self.findings or self.lost) or failed


class WarmRanks:
    """Ranks that are forked once and stay, and the store in which their process groups meet; `apart`, each from an
    interpreter of its own."""

    def __init__(self, root: str, preload: Sequence[str], *, apart: bool = False) -> None:
        self._root, self._preload, self._apart = root, preload, apart
        self._ranks: list[WarmRank] = []
        self._servers: list[ForkServer] = []
        self._key = secrets.token_bytes(KEY_BYTES)
        self._store: StoreServer | None = None

    @property
    def port(self) -> int:
        """Of the store, which is opened with the first use."""
        if self._store is None:
            self._store = StoreServer(listen("127.0.0.1"), self._key)
        return self._store.port

    def fork(self, count: int, serve: Callable[..., None], files: Sequence[str] = ()) -> list[WarmRank]:
        """The ranks that are missing from `count`, not yet ready; raises ConfigError where too few files may open."""
        refuse_too_few(count)
        for _ in range(len(self._servers), count if self._apart else 1):
            self._servers.append(ForkServer(self._preload))
            self._servers[-1].start()
        new = [self._made(rank, serve, files) for rank in range(len(self._ranks), count)]
        self._ranks += new
        return new

    @staticmethod
    def hear(rank: WarmRank, what: str, at_most_s: float) -> None:
        """Wait for a rank's word that it did `what`; raises RuntimeError where it does not come."""
        if not rank.control.poll(at_most_s):
            raise RuntimeError(f"a rank did not {what} in {at_most_s:g} s")
        try:
            rank.control.recv()
        except (EOFError, OSError):
            last = rank.printed().strip()[-300:]
            raise RuntimeError(
                f"a rank's process ended before it could {what}: {last or 'it printed nothing'}"
            ) from None

    def replace(self, rank: int, serve: Callable[..., None], files: Sequence[str] = ()) -> WarmRank:
        """A new process in the place of this rank's, not yet ready."""
        self._ranks[rank].kill()
        self._ranks[rank] = new = self._made(rank, serve, files)
        return new

    def _made(self, rank: int, serve: Callable[..., None], files: Sequence[str]) -> WarmRank:
        start = Start(rank, self.port, self._key, self._root, sys.path, files)
        return WarmRank(start, self._servers[rank if self._apart else 0], serve)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def close_servers(self) -> None:
        for server in self._servers:
            server.close()
        self._servers = []

    def close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None

    def let_end(self, at_most_s: float) -> None:
        """Have the ranks end by themselves, so that their coverage is written."""
        for rank in self._ranks:
            rank.control.send(None)
        for rank in self._ranks:
            rank.bedside.process.join(at_most_s)


class Watching:
    """One test on its ranks, from the beginning to its end."""

    def __init__(self, ranks: Sequence[WarmRank], timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._doctor = Doctor(
            len(ranks),
            min(HANG_AFTER_S, timeout_s / 3),
            timeout_s,
            lambda text: None,  # noqa: ARG005
            gather_s=GATHER_S,
            promises=True,
        )
        self._ended: dict[int, Ended] = {}

    def until_the_end(self) -> Outcome:
        """Listen until all have ended, or nothing more is to be waited for."""
        deadline = time.monotonic() + self._timeout_s
        listened = time.monotonic()
        while len(self._ended) < len(self._ranks) and not self._doctor.over:
            self._receive(AT_ONCE_S)
            if time.monotonic() - listened > LISTEN_S:
                listened = time.monotonic()
                self._listen()
            # What the bound does not count, once it is over: ranks that wait for a core on a busy machine do not hang.
            starved_s = max(rank.starved_s() for rank in self._ranks) if time.monotonic() > deadline else 0.0
            if time.monotonic() > deadline + starved_s:
                self._listen()
                return self._outcome(f"not done after {self._timeout_s:g} s")
        until = time.monotonic() + LAST_S
        while self._doctor.whole and len(self._ended) < len(self._ranks) and time.monotonic() < until:
            self._receive(AT_ONCE_S)  # a rank tells the doctor of its end, and then sends how it was
        failed = any(each.outcome == "failed" for each in self._ended.values())
        while not self._doctor.over:
            self._listen()
            if not failed:
                break
            time.sleep(LISTEN_S)
        return self._outcome()

    def _receive(self, for_s: float) -> None:
        controls = {rank.control: number for number, rank in enumerate(self._ranks) if number not in self._ended}
        for each in wait([*controls, *(rank.bedside.process.sentinel for rank in self._ranks)], for_s):
            if isinstance(each, Connection) and each in controls:
                try:
                    self._ended[controls[each]] = each.recv()
                except (EOFError, OSError):
                    time.sleep(for_s)  # its process is gone, which is heard

    def _listen(self) -> None:
        for number, rank in enumerate(self._ranks):
            self._doctor.take(number, rank.hearing.lines(0.0), now())
        self._doctor.look(now())

    def _outcome(self, late: str = "") -> Outcome:
        rows = [(f"rank {case.rank}", where(case.frames())) for case in self._doctor.cases if not case.over]
        printed = {number: rank.printed() for number, rank in enumerate(self._ranks)}
        kept = [each for each in self._doctor.findings if each.check in (MATCH, HANG, END)]
        return Outcome(self._ended, kept, printed, self._doctor.lost, late, rows if late else [])


def where(frames: Sequence[Any]) -> str:
    shown = [f"{os.path.relpath(each.file)}:{each.line} in {each.function}" for each in frames[:4]]
    return " < ".join(shown) or "unknown"
