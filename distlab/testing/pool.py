"""A pool of warm ranks in pytest's process: it hands them a test, listens as a doctor does, and ends what hangs.

Ranks are forked from fork servers (preloaded.py says why), each from its own, as many as the largest test so far has
asked for, and stay for the next test. After a failure the pool is killed as a whole: who knows what a rank that raised
has left behind; the next test forks new ones, which takes a tenth of a second each.
"""

import atexit
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from distlab.check.coordinator import Doctor
from distlab.check.fork_servers import ForkServer, TravellingFiles, is_one_for_all
from distlab.check.rank_state import END, HANG, MATCH, Finding
from distlab.check.script_process import Bedside, Hearing, pipes
from distlab.check.telling import now
from distlab.cluster import name_ranks
from distlab.testing.rank import Ended, Start, Task, serve
from distlab.transport.handshake import listen
from distlab.transport.store_server import StoreHost

START_S = 60.0  # for a rank to be there, on a machine that does much else
LISTEN_S = 0.25
HANG_AFTER_S = 3.0  # without progress, until ranks that wait for each other are called hung
AT_ONCE_S = 0.02
KEY_BYTES = 32
GATHER_S = 0.5  # what ranks have told is in a pipe of this process, and on no store


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

    def begin(self, task: Task) -> None:
        self.output.truncate(0)
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
        self._store: StoreHost | None = None

    @property
    def port(self) -> int:
        """Of the store, which is opened with the first use."""
        if self._store is None:
            self._store = StoreHost(listen("127.0.0.1"), self._key)
        return self._store.port

    def fork(self, count: int, serve: Callable[..., None], files: Sequence[str] = ()) -> list[WarmRank]:
        """The ranks that are missing from `count`, not yet ready."""
        for _ in range(len(self._servers), count if self._apart else 1):
            self._servers.append(ForkServer(self._preload))
            self._servers[-1].start()
        missing = range(len(self._ranks), count)
        starts = [Start(rank, self.port, self._key, self._root, sys.path, files) for rank in missing]
        new = [WarmRank(start, self._servers[start.rank if self._apart else 0], serve) for start in starts]
        self._ranks += new
        return new

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


class Pool(WarmRanks):
    """The ranks that run tests marked with `distlab.ranks`."""

    def __init__(self, root: str, files: Sequence[str], preload: Sequence[str]) -> None:
        super().__init__(root, preload, apart=not is_one_for_all())
        self._files, self._tasks = files, 0
        atexit.register(self.kill)

    def next_number(self) -> int:
        self._tasks += 1
        return self._tasks

    def run(self, tasks: Sequence[Task]) -> Outcome:
        """One task a rank; ends after the longest bound of them."""
        for new in self.fork(len(tasks), serve, self._files):
            if not new.control.poll(START_S):
                raise RuntimeError(f"a rank did not start in {START_S:g} s")
            new.control.recv()
        for rank, task in zip(self._ranks, tasks, strict=False):
            rank.begin(task)
        outcome = Watching(self._ranks[: len(tasks)], tasks[0].timeout_s).until_the_end()
        if outcome.is_bad:
            self.kill()
        return outcome

    def close(self) -> None:
        self.let_end(2)
        self.kill()
        self.close_servers()
        self.close_store()


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
                except EOFError:
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


def failure_text(outcome: Outcome) -> str:
    """A failed test: the doctor's sentences, where each rank was, and the traceback of who failed itself."""
    said = [f"rank {rank} {how}" for rank, how in outcome.lost.items()]  # what others raised came of it
    said += [finding.sentence for finding in outcome.findings]
    if outcome.late:
        said.append(outcome.late)
    if not said:
        odd = [rank for rank, each in outcome.ended.items() if each.outcome == "failed"]
        said.append(f"{name_ranks(odd)} failed")
    for finding in outcome.findings:
        said += ["  ".join(row).rstrip() for row in finding.rows]
    said += ["  ".join(row) for row in outcome.rows]
    blamed = {rank for finding in outcome.findings if finding.check == END for rank in finding.ranks}
    texts: dict[str, list[int]] = {}
    for rank, each in sorted(outcome.ended.items()):
        if each.outcome == "failed" and (rank in blamed or not (outcome.findings or outcome.lost)):
            texts.setdefault(each.text, []).append(rank)
    for text, ranks in texts.items():
        said += ["", f"on {name_ranks(ranks)}:", text]
    return "\n".join(said)
