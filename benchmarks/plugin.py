"""Fifty tests on ranks, twenty times over: how long a test takes on a warm pool, the pool's start, and what is left.

    python -m benchmarks.plugin [TIMES]

Each run is a pytest of its own. A test's cost is that of its body too, an all_reduce or two; the pool's start is the
first test, which torch's import in pytest's own process is no part of.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rounds import table

TESTS = 50
SOURCE = """
import pytest
import torch
import torch.distributed as dist

import distlab


@distlab.ranks(4)
@pytest.mark.parametrize("number", range(%d))
def test_sum(rank, number):
    tensor = torch.full((1000,), float(rank + number))
    dist.all_reduce(tensor)
    assert tensor[0] == 6 + 4 * number


@distlab.ranks(4, timeout_s=10)
def test_deadlock(rank):
    if rank:
        dist.barrier()
"""


def main(times: int = 20) -> int:
    """Run them; returns 1 if any run did not end as it should."""
    starts, warm, hangs, whole = [], [], [], []
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test_fifty.py"
        file.write_text(SOURCE % (TESTS - 1))
        for _ in range(times):
            began = time.monotonic()
            words = ["-q", "-p", "no:cacheprovider", "--durations=0", "-vv", str(file)]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *words],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            whole.append(time.monotonic() - began)
            good = f"1 failed, {TESTS - 1} passed" in done.stdout
            wrong += not good or something_is_left()
            took = [float(each) for each in re.findall(r"([0-9.]+)s call +\S*test_sum", done.stdout)]
            starts.append(max(took))
            warm += sorted(took)[:-1]
            hangs += [float(each) for each in re.findall(r"([0-9.]+)s call +\S*test_deadlock", done.stdout)]
    rows = [
        ["a test on a warm pool", statistics.median(warm), max(warm), 0.5],
        ["the first test: four ranks started", statistics.median(starts), max(starts), 3.0],
        ["a deadlock, until it has failed", statistics.median(hangs), max(hangs), 10.0],
        [f"all {TESTS} tests", statistics.median(whole), max(whole), ""],
    ]
    print(
        table(
            ["seconds", "median", "largest", "at most"],
            [[row[0], f"{row[1]:.2f}", f"{row[2]:.2f}", row[3]] for row in rows],
        )
    )
    print(f"{times} runs of {TESTS} tests, {wrong} of them not as they should be")
    return 1 if wrong else 0


def something_is_left() -> bool:
    """Whether a process of a pool is there still, a second after its pytest has ended."""
    deadline = time.monotonic() + 1
    while found := pools():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return bool(found)


def pools() -> int:
    """Processes of a pool."""
    found = 0
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += b"distlab.testing.preloaded" in place.read_bytes()
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
