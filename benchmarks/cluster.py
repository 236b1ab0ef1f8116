"""What the lab itself costs: from `docker compose up` to the first step and to the end, the watch, a rank's imports.

The default dp run of four ranks in containers, image built, over gloo and over plain TCP. Times are absolute here,
since no other program does the same: read them on an idle machine.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.rounds import table

TOP = Path(__file__).parent.parent
IMPORTS = """
import time, torch, torch.distributed
started = time.perf_counter()
import distlab.cli.run, distlab.lab.rank.main, distlab.experiments.dp
print(time.perf_counter() - started)
"""
COMPOSE = ["docker", "compose"]


def main() -> None:
    """Print each figure beside its target."""
    rows = [["imports of a rank beside torch", f"{imports_s():.2f} s", "0.3 s"]]
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        subprocess.run([*COMPOSE, "build", "--quiet"], cwd=TOP, check=True)
        rows += [row for backend in ("gloo", "tcp") for row in of_the_default_run(backend)]
    else:
        print("no Docker engine answers: the start-up of containers is not measured")
    print(table(["cluster", "measured", "at most"], rows))


def imports_s(runs: int = 5) -> float:
    """Median seconds that a rank's own modules and their libraries take after torch is there."""
    program = [sys.executable, "-c", IMPORTS]
    seconds = [float(subprocess.run(program, cwd=TOP, capture_output=True, check=True).stdout) for _ in range(runs)]
    return statistics.median(seconds)


def of_the_default_run(backend: str) -> list[list[str]]:
    """The default run in containers, from the clock before `up` to what the ranks recorded."""
    subprocess.run([*COMPOSE, "down", "--remove-orphans"], cwd=TOP, capture_output=True, check=True)
    began_at = time.time()
    subprocess.run(
        [*COMPOSE, "up"], cwd=TOP, env=os.environ | {"LAB_BACKEND": backend}, capture_output=True, check=True
    )
    took_s = time.time() - began_at
    subprocess.run([*COMPOSE, "down"], cwd=TOP, capture_output=True, check=True)
    ends = [last_record(path) for path in sorted((TOP / "runs" / "latest").glob("rank[0-9].jsonl"))]
    first_step_s = max(end["first_step_at"] for end in ends) - began_at
    watch = max(end["watch_cpu_s"] / (end["ended_at"] - end["started_at"]) for end in ends)
    return [
        [f"first training step after `docker compose up`, {backend}", f"{first_step_s:.1f} s", "6 s"],
        [f"the default dp run, containers gone, {backend}", f"{took_s:.1f} s", "30 s"],
        [f"the watch, of a core, {backend}", f"{watch:.2%}", "1 %"],
    ]


def last_record(path: Path) -> dict[str, Any]:
    """The End record of a rank that came through."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return record


if __name__ == "__main__":
    main()
