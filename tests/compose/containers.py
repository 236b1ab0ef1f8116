"""Real containers for a test: one Compose project with its own folder of runs; every wait has a time limit."""

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from distlab.lab.report.table import INDENT

TOP = Path(__file__).parent.parent.parent

# A small model.
TINY = {"LAB_MODEL": "mlp", "LAB_WIDTH": "32", "LAB_DEPTH": "2", "LAB_STEPS": "5"}


def clean_environ(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the shell's environment without settings of the lab or of Compose, plus `variables`; rank 0 prints its full
    log."""
    settings = re.compile(r"LAB_|COMPOSE_|RUN_MODE$|WORLD_SIZE$|(LOCAL_)?RANK$|MASTER_")
    return (
        {name: value for name, value in os.environ.items() if not settings.match(name)}
        | {"LAB_LOG": "full"}
        | dict(variables or {})
    )


def call(
    *command: str,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    check: bool = True,
    folder: Path = TOP,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output, both streams in one; with `check` a code other than 0 fails the test."""
    done = subprocess.run(
        command, cwd=folder, env=clean_environ(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{' '.join(command)} returned {done.returncode}:\n{done.stdout}"
    return done


class Containers:
    """A cluster of containers: `up`, then `wait` for the ranks' exit codes, then read their logs and files."""

    def __init__(self, project: str, runs: Path, overlay: Path | None = None) -> None:
        self.project, self.runs, self.overlay = project, runs, overlay
        self.world_size = 0

    def compose(
        self, *arguments: str, variables: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        files = ["-f", "docker-compose.yaml", *(["-f", str(self.overlay)] if self.overlay else [])]
        environ = {"LAB_RUNS_DIR": str(self.runs), "WORLD_SIZE": "8"} | dict(variables or {})
        return call(
            "docker", "compose", "-p", self.project, *files, *arguments, environ=environ, timeout_s=90, check=check
        )

    def up(self, world_size: int, **variables: str) -> None:
        """Start the ranks; returns when their containers run."""
        self.world_size = world_size
        self.compose("up", "-d", "--no-build", variables={"WORLD_SIZE": str(world_size)} | variables)

    def run(self, world_size: int, **variables: str) -> dict[int, int]:
        """Start the ranks and wait for their exit codes."""
        self.up(world_size, **variables)
        return self.wait()

    def wait_until_started(self, timeout_s: float = 30) -> None:
        """Wait until every container's init has started its program, and forwards signals.

        A container runs some milliseconds before its init handles signals, and the kernel drops signals to a process 1
        without a handler. Of 150 stops directly after `up` on two busy cores, 4 came 10 to 50 ms after the start, and
        the containers ended by SIGKILL.
        """
        deadline = time.monotonic() + timeout_s
        for rank in range(self.world_size):
            while len(call("docker", "top", self.name(rank)).stdout.splitlines()) < 3:  # a heading, the init, its child
                assert time.monotonic() < deadline, f"rank {rank} did not begin in {timeout_s} s:\n{self.logs()}"
                time.sleep(0.05)

    def run_alone(self, service: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one rank alone, with variables that replace those of the Compose file."""
        options = [part for name, value in variables.items() for part in ("-e", f"{name}={value}")]
        return self.compose("run", "--rm", "-T", "--no-deps", *options, service, check=False)

    def wait(self, *ranks: int, timeout_s: float = 100) -> dict[int, int]:
        """Wait for these ranks, by default all, and return their exit codes."""
        wanted = ranks or tuple(range(self.world_size))
        try:
            done = call("docker", "wait", *map(self.name, wanted), timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"ranks {wanted} did not end in {timeout_s} s:\n{self.logs()}") from None
        return dict(zip(wanted, map(int, done.stdout.split()), strict=True))

    def name(self, rank: int) -> str:
        return f"{self.project}-worker{rank}-1"

    def docker(self, verb: str, rank: int) -> None:
        call("docker", *verb.split(), self.name(rank))

    def log(self, rank: int, *options: str) -> str:
        return call("docker", "logs", *options, self.name(rank)).stdout

    def logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in range(self.world_size))

    def state(self, rank: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(
            call("docker", "inspect", "--format", "{{json .State}}", self.name(rank)).stdout
        )
        return state

    def wait_for_line(self, rank: int, pattern: str, timeout_s: float = 60) -> tuple[str, float]:
        """Wait for `pattern` in a rank's log; returns the unwrapped line and its time in epoch seconds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            stamp, sentence = "", ""
            for line in self.log(rank, "--timestamps").splitlines():
                at, _, text = line.partition(" ")
                goes_on = re.match(rf" {{{INDENT}}}\S", text)
                stamp, sentence = (stamp, f"{sentence} {text.strip()}") if goes_on else (at, text)
                if re.search(pattern, sentence):
                    return sentence, parse_time(stamp)
            time.sleep(0.1)
        raise AssertionError(f"rank {rank} did not print {pattern!r} in {timeout_s} s:\n{self.logs()}")

    def verdict(self) -> dict[str, Any]:
        """Return the run.json of the only run."""
        (path,) = [path for path in self.runs.glob("*/run.json") if path.parent.name != "latest"]
        run: dict[str, Any] = json.loads(path.read_text())
        return run

    def down(self) -> None:
        self.compose("down", "--remove-orphans", "--timeout", "0")


def parse_time(stamp: str) -> float:
    """Return epoch seconds; Docker's timestamps have nanoseconds, Python's at most microseconds."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*Z$", r"\1+00:00", stamp)).timestamp()
