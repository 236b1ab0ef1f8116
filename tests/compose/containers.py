"""Real containers under a test: one Compose project with a folder of runs of its own, every wait bounded."""

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

# The smallest model that still has everything.
TINY = {"LAB_MODEL": "mlp", "LAB_WIDTH": "32", "LAB_DEPTH": "2", "LAB_STEPS": "5"}


def clean_environ(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The shell's environment without any setting of the lab or of Compose, and `variables`; rank 0 says all that it
    can say."""
    own = re.compile(r"LAB_|COMPOSE_|RUN_MODE$|WORLD_SIZE$|(LOCAL_)?RANK$|MASTER_")
    return (
        {name: value for name, value in os.environ.items() if not own.match(name)}
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
    """Run a command with its output taken, both streams as one; an unwanted code fails with what it printed."""
    done = subprocess.run(
        command, cwd=folder, env=clean_environ(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{' '.join(command)} returned {done.returncode}:\n{done.stdout}"
    return done


class Containers:
    """A cluster of containers: `up`, then `wait` for the ranks' exit codes, then read what they said and left."""

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
        """Start the ranks; returns when they run."""
        self.world_size = world_size
        self.compose("up", "-d", "--no-build", variables={"WORLD_SIZE": str(world_size)} | variables)

    def run(self, world_size: int, **variables: str) -> dict[int, int]:
        """Start the ranks and wait for their exit codes."""
        self.up(world_size, **variables)
        return self.wait()

    def begun(self, timeout_s: float = 30) -> None:
        """Return once every rank's init has begun its program, and hands signals on.

        A container runs milliseconds before its init listens, and the kernel drops what it sends to a process 1 that
        does not: of 150 stops right behind `up` on two busy cores 4 came 10 to 50 ms after the start, and ended by
        SIGKILL.
        """
        deadline = time.monotonic() + timeout_s
        for rank in range(self.world_size):
            while len(call("docker", "top", self.name(rank)).stdout.splitlines()) < 3:  # a heading, the init, its child
                assert time.monotonic() < deadline, f"rank {rank} did not begin in {timeout_s} s:\n{self.logs()}"
                time.sleep(0.05)

    def alone(self, service: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """One rank by itself, with variables that the Compose file would set otherwise."""
        given = [part for name, value in variables.items() for part in ("-e", f"{name}={value}")]
        return self.compose("run", "--rm", "-T", "--no-deps", *given, service, check=False)

    def wait(self, *ranks: int, timeout_s: float = 100) -> dict[int, int]:
        """The exit codes of these ranks, of all by default."""
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

    def until(self, rank: int, pattern: str, timeout_s: float = 60) -> tuple[str, float]:
        """The first line of a rank's log in which `pattern` is found, however it was wrapped, and when it was written, in
        epoch seconds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            stamp, whole = "", ""
            for line in self.log(rank, "--timestamps").splitlines():
                at, _, text = line.partition(" ")
                goes_on = re.match(rf" {{{INDENT}}}\S", text)
                stamp, whole = (stamp, f"{whole} {text.strip()}") if goes_on else (at, text)
                if re.search(pattern, whole):
                    return whole, parse_time(stamp)
            time.sleep(0.1)
        raise AssertionError(f"rank {rank} did not say {pattern!r} in {timeout_s} s:\n{self.logs()}")

    def verdict(self) -> dict[str, Any]:
        """The run.json of the only run."""
        (path,) = [path for path in self.runs.glob("*/run.json") if path.parent.name != "latest"]
        run: dict[str, Any] = json.loads(path.read_text())
        return run

    def down(self) -> None:
        self.compose("down", "--remove-orphans", "--timeout", "0")


def parse_time(stamp: str) -> float:
    """Docker's timestamps have nanoseconds, Python's at most microseconds."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*Z$", r"\1+00:00", stamp)).timestamp()
