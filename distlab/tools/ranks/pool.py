"""A pool of ranks, in the process that owns it: pytest, a notebook's kernel, or the judge of puzzles.

Ranks are forked from fork servers, as many as the largest task so far needed, and stay for the next one; a coordinator
watches each task. After a failure all are killed, except a notebook's, since a failed rank's state is unknown; the next
task forks new ones, which takes a tenth of a second each.
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

from distlab.lab.cluster import name_ranks
from distlab.lab.cluster.launch import check_open_file_limit
from distlab.techniques.transport.handshake import listen
from distlab.techniques.transport.store_server import StoreServer
from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.check.judge.rank_state import END, HANG, MATCH, Finding
from distlab.tools.check.start.fork_servers import FilesToSend, ForkServer, has_fixed_hash_seed
from distlab.tools.check.start.script_process import ScriptChannel, ScriptMonitor, pipes
from distlab.tools.check.watch.reporter import now
from distlab.tools.ranks.rank import INTERRUPT, Executor, Group, Rank, RankResult, Start, serve

PRELOADED = "distlab.tools.ranks.preloaded"
START_S = 60.0  # for a rank to start, on a busy machine
LISTEN_S = 0.25
HANG_AFTER_S = 3.0  # without progress, until ranks that wait for each other count as hung
POLL_S = 0.02
RESULT_S = 1.0
KEY_BYTES = 32
GATHER_S = 0.5  # ranks report through a pipe of this process, not a store


class WarmRank:
    """One rank of a pool; its process calls `target(start, files, control)`."""

    def __init__(self, start: Start, server: ForkServer, target: Callable[..., None]) -> None:
        own_ends, rank_ends = pipes()
        self.output: IO[bytes] = tempfile.TemporaryFile("ab+", buffering=0)  # noqa: SIM115  open as long as it lives
        self.control, rank_end = Pipe()
        files = FilesToSend(*rank_ends, self.output.fileno())
        process = server.start_process(target, (start, files, rank_end), f"rank {start.rank}")
        rank_ends.close()
        rank_end.close()
        self.channel = ScriptChannel(process, own_ends)

    def begin(self, task: Any) -> None:
        self.output.truncate(0)
        while self.channel.receive(0.0):  # reports of an interrupted rank belong to the previous task
            pass
        self.monitor = ScriptMonitor(self.channel)
        self._starved_before_s = self.channel.starved_s()
        self.control.send(task)

    def interrupt(self) -> None:
        """Interrupt its task."""
        self.control.send_bytes(INTERRUPT)

    def starved_s(self) -> float:
        """Return how long the task was runnable here without a core."""
        return self.channel.starved_s() - self._starved_before_s

    def printed(self) -> str:
        return os.pread(self.output.fileno(), 1 << 20, 0).decode(errors="replace")

    def kill(self) -> None:
        self.channel.kill()
        self.channel.close()
        self.control.close()
        self.output.close()


@dataclass
class Outcome:
    """The outcome of a task."""

    ended: dict[int, RankResult]
    findings: list[Finding]
    printed: dict[int, str]
    lost: Mapping[int, str]  # ranks whose processes were killed, and how
    stop_reason: str = ""  # why it was ended, if not for a finding
    rows: list[tuple[str, str]] = field(default_factory=list)  # where each rank was then

    @property
    def failed(self) -> dict[int, RankResult]:
        return {rank: each for rank, each in sorted(self.ended.items()) if each.outcome == "failed"}

    @property
    def is_bad(self) -> bool:
        """Return whether the task has failed."""
        return bool(self.stop_reason or self.findings or self.lost or self.failed)

    def raised(self) -> dict[int, RankResult]:
        """Return the ranks that failed first: those the coordinator blames, or all failed ones without a finding."""
        blamed = {rank for finding in self.findings if finding.check == END for rank in finding.ranks}
        own = {rank: each for rank, each in self.failed.items() if rank in blamed}
        return own or ({} if self.findings or self.lost else self.failed)

    def lines(self) -> list[str]:
        """Return the report of a failure: the coordinator's sentences, where each rank was, and the first errors."""
        lines = [f"rank {rank} {how}" for rank, how in self.lost.items()]  # the other errors follow from it
        lines += [finding.sentence for finding in self.findings]
        lines += [self.stop_reason] * bool(self.stop_reason)
        lines = lines or [f"{name_ranks(list(self.failed))} failed"]
        lines += ["  ".join(row).rstrip() for finding in self.findings for row in finding.rows]
        lines += ["  ".join(row) for row in self.rows]
        texts: dict[str, list[int]] = {}
        for rank, each in self.raised().items():
            texts.setdefault(each.text, []).append(rank)
        for text, ranks in texts.items():
            lines += ["", f"on {name_ranks(ranks)}:", text] if text else []
        return lines


class WarmRanks:
    """Ranks that are forked once and stay, each with an `executor` (rank.py), and the store in which they meet.

    `folder` has the user's files; with `own_interpreters`, each is forked from its own interpreter, as under torchrun.
    """

    target = staticmethod(serve)  # of a rank's process

    def __init__(
        self, executor: Callable[[Rank], Executor], root: str, folder: str = "", preload: Sequence[str] = (), *,
        own_interpreters: bool = False,
    ) -> None:  # fmt: skip
        self._executor, self._root, self._folder = executor, root, folder or root
        self._preload, self._own_interpreters = [PRELOADED, *preload], own_interpreters and not has_fixed_hash_seed()
        self._ranks: list[WarmRank] = []
        self._servers: list[ForkServer] = []
        self._key = secrets.token_bytes(KEY_BYTES)
        self._store: StoreServer | None = None
        self._groups = 0
        atexit.register(self.close)

    @property
    def port(self) -> int:
        """Return the store's port; opens the store at its first use."""
        if self._store is None:
            self._store = StoreServer(listen("127.0.0.1"), self._key)
        return self._store.port

    def next_group(self, world_size: int, bound_s: float, backend: str = "gloo") -> Group:
        """Return a new group for this many ranks."""
        self._groups += 1
        return Group(self._groups, world_size, bound_s, backend)

    def run(self, tasks: Sequence[Any], timeout_s: float) -> Outcome:
        """Run one task per rank, for at most `timeout_s`; raises like `ensure`."""
        self.ensure(len(tasks))
        for rank, task in zip(self._ranks, tasks, strict=False):
            rank.begin(task)
        outcome = TaskMonitor(self._ranks[: len(tasks)], timeout_s).follow_to_end()
        if outcome.is_bad:
            self.kill()
        return outcome

    def ensure(self, count: int) -> None:
        """Start at least this many ranks; raises ConfigError if too few files may be open, RuntimeError if one does
        not start."""
        for new in self.fork(count):
            self.await_rank(new, "start")

    def fork(self, count: int) -> list[WarmRank]:
        """Fork the ranks missing from `count`, not yet ready."""
        check_open_file_limit(count)
        for _ in range(len(self._servers), count if self._own_interpreters else 1):
            self._servers.append(ForkServer(self._preload))
            self._servers[-1].start()
        new = [self._fork_rank(rank) for rank in range(len(self._ranks), count)]
        self._ranks += new
        return new

    @staticmethod
    def await_rank(rank: WarmRank, what: str) -> None:
        """Wait for a rank's report that it did `what`; raises RuntimeError if none arrives."""
        if not rank.control.poll(START_S):
            raise RuntimeError(f"a rank did not {what} in {START_S:g} s")
        try:
            rank.control.recv()
        except (EOFError, OSError):
            last = rank.printed().strip()[-300:]
            raise RuntimeError(
                f"a rank's process ended before it could {what}: {last or 'it printed nothing'}"
            ) from None

    def replace(self, rank: int) -> None:
        """Replace this rank's process with a new one."""
        self._ranks[rank].kill()
        self._ranks[rank] = self._fork_rank(rank)
        self.await_rank(self._ranks[rank], "start")

    def _fork_rank(self, rank: int) -> WarmRank:
        start = Start(rank, self.port, self._key, self._root, sys.path, self._folder, self._executor)
        return WarmRank(start, self._servers[rank if self._own_interpreters else 0], self.target)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def close_store(self) -> None:
        """Close the store; ranks forked later begin with an empty one."""
        if self._store is not None:
            self._store.close()
        self._store = None

    def close(self) -> None:
        """End all ranks and free their resources."""
        self.kill()
        for server in self._servers:
            server.close()
        self._servers = []
        self.close_store()
        atexit.unregister(self.close)


class TaskMonitor:
    """One task on its ranks, from begin to end; `reports` has each rank's lines if `keep_reports`."""

    def __init__(self, ranks: Sequence[WarmRank], timeout_s: float, *, keep_reports: bool = False) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self.reports: list[list[bytes]] = [[] for _ in ranks if keep_reports]
        self.coordinator = Coordinator(
            len(ranks),
            min(HANG_AFTER_S, timeout_s / 3),
            timeout_s,
            lambda text: None,  # noqa: ARG005
            gather_s=GATHER_S,
            reports_end=True,
        )
        self._ended: dict[int, RankResult] = {}

    def follow_to_end(self) -> Outcome:
        """Receive reports until all have ended, or waiting is useless."""
        deadline = time.monotonic() + self._timeout_s
        listened_at = time.monotonic()
        while len(self._ended) < len(self._ranks) and not self.coordinator.over:
            self._receive(POLL_S)
            if time.monotonic() - listened_at > LISTEN_S:
                listened_at = time.monotonic()
                self._listen()
            # Time that the bound excludes: ranks that wait for a core on a busy machine do not hang.
            starved_s = max(rank.starved_s() for rank in self._ranks) if time.monotonic() > deadline else 0.0
            if time.monotonic() > deadline + starved_s:
                self._listen()
                return self.outcome(f"not done after {self._timeout_s:g} s")
        until = time.monotonic() + RESULT_S
        while self.coordinator.completed and len(self._ended) < len(self._ranks) and time.monotonic() < until:
            self._receive(POLL_S)  # a rank reports its end to the coordinator, then sends its result
        failed = any(each.outcome == "failed" for each in self._ended.values())
        while not self.coordinator.over:
            self._listen()
            if not failed:
                break
            time.sleep(LISTEN_S)
        return self.outcome()

    def _receive(self, for_s: float) -> None:
        controls = {rank.control: number for number, rank in enumerate(self._ranks) if number not in self._ended}
        for each in wait([*controls, *(rank.channel.process.sentinel for rank in self._ranks)], for_s):
            if isinstance(each, Connection) and each in controls:
                try:
                    self._ended[controls[each]] = each.recv()
                except (EOFError, OSError):
                    time.sleep(for_s)  # its process has exited, which is detected elsewhere

    def _listen(self) -> None:
        for number, rank in enumerate(self._ranks):
            lines = rank.monitor.lines(0.0)
            if self.reports:
                self.reports[number] += lines
            self.coordinator.receive(number, lines, now())
        self.coordinator.evaluate(now())

    def outcome(self, stop_reason: str = "") -> Outcome:
        """Return the outcome as known now."""
        rows = [(f"rank {each.rank}", format_stack(each.frames())) for each in self.coordinator.states if not each.over]
        printed = {number: rank.printed() for number, rank in enumerate(self._ranks)}
        findings = [each for each in self.coordinator.findings if each.check in (MATCH, HANG, END)]
        return Outcome(self._ended, findings, printed, self.coordinator.lost, stop_reason, rows if stop_reason else [])


def format_stack(frames: Sequence[Any]) -> str:
    shown = [f"{os.path.relpath(each.file)}:{each.line} in {each.function}" for each in frames[:4]]
    return " < ".join(shown) or "unknown"
