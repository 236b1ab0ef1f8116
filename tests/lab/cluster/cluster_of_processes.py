"""Real ranks as processes for tests: start them, read their output, send signals, and wait with a timeout."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.lab.cluster.launch import free_port
from tests.launched import clean
from tests.warm import Warm

TOP = Path(__file__).parents[3]
END_S = 45.0


class Rank:
    """One started process, and its lines with the times at which they arrived."""

    def __init__(self, command: list[str], variables: dict[str, str], descriptors: Sequence[int] = ()) -> None:
        quiet = {
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "LAB_LOG": "full",
            "PYTHONPATH": str(TOP),
        }
        environ = clean(**quiet | variables)
        self.process: subprocess.Popen[str] | Warm
        if command[:2] == [sys.executable, "-m"] and not descriptors:
            self.process = Warm(command[2], command[3:], environ)
        elif command[:2] == [sys.executable, "-c"]:
            self.process = Warm("-c", command[2:], environ)
        else:
            self.process = subprocess.Popen(
                command, cwd=TOP, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, pass_fds=descriptors,
            )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self.ended_at = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))
        self.ended_at = time.monotonic()

    def write(self, line: str) -> None:
        """Send a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def after_import_s(self) -> float:
        """Return how long it ran after the import of torch."""
        return self.ended_at - self.lines[0][0]

    def printed_after_s(self, words: str) -> float:
        """Return when, after the import of torch, it printed the first line with these words."""
        return next(at for at, line in self.lines if words in line) - self.lines[0][0]

    def until(self, pattern: str, timeout_s: float = END_S) -> None:
        """Wait for a line that matches; fails with all printed lines."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} in {timeout_s} s:\n{self.text}"
            time.sleep(0.02)

    def end(self, timeout_s: float = END_S) -> int:
        """Return the exit code as a shell does; fails with all printed lines if there is none in time."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it did not end in {timeout_s} s:\n{self.text}") from error
        self._reader.join(5)
        return 128 - code if code < 0 else code


class Processes:
    """All processes of one test; `close` ends them."""

    def __init__(self, runs: Path) -> None:
        self.all: list[Rank] = []
        self.port = free_port()
        self.runs = runs

    def rank(
        self, rank: int, world_size: int, *, version: str = "v1", steps: int = 400, action: str = "", **variables: str
    ) -> Rank:
        """Start `one_rank.py` as a rank."""
        environ = {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
            "LAB_JOIN_TIMEOUT_S": "30", "LAB_RUNS_DIR": str(self.runs),
        }  # fmt: skip
        return self.run(
            [sys.executable, "-m", "tests.lab.cluster.one_rank", version, str(steps), action], environ | variables
        )

    def world(self, world_size: int, **options: Any) -> list[Rank]:
        return [self.rank(rank, world_size, **options) for rank in range(world_size)]

    def run(self, command: list[str], variables: dict[str, str]) -> Rank:
        started = Rank(command, variables)
        self.all.append(started)
        return started

    def close(self) -> None:
        for each in self.all:
            with contextlib.suppress(ProcessLookupError):
                each.process.send_signal(signal.SIGCONT)
            each.process.kill()
            each.process.wait()
