"""Reading the dumps of a large job, 512 ranks of 2,000 calls: `python -m benchmarks.dumps`.

Each rank trains in a group of all ranks and one of its node of 8; rank 3 leaves a collective out before the others'
last one. Timed is the whole command, and its memory is the process's peak.
"""

import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.rounds import table
from tests.tools.check.dump import synthetic
from tests.tools.check.dump.synthetic import WORLD, entry

NODE, LATE, EVERY = 8, 3, 4  # ranks of a node; the rank that is behind; each fourth call is of all ranks
MOST_S, MOST_BYTES = 20.0, 10**9
OPS = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "all_reduce")


def dump(rank: int, num_ranks: int, num_entries: int) -> dict[str, Any]:
    """What one rank left."""
    node = str(1 + rank // NODE)
    begin = rank // NODE * NODE
    entries, turns = list[dict[str, Any]](), {WORLD: 0, node: 0}
    for number in range(num_entries - (rank == LATE)):
        group = WORLD if number % EVERY == EVERY - 1 else node
        state, callers = "completed" if number < num_entries - 1 else "started", [("model.py", 30), ("loop.py", 9)]
        size, line = 1024 * (1 + number % 8), 100 + number % 16
        op = OPS[number % len(OPS)]
        entries.append(
            entry(op, turns[group], line, group=group, state=state, number=number, size=size, callers=callers)
        )
        turns[group] += 1
    return synthetic.dump(entries, {WORLD: range(num_ranks), node: range(begin, min(begin + NODE, num_ranks))})


def main(num_ranks: int = 512, num_entries: int = 2000) -> int:
    """Write, read, and judge; 1 where the time or the memory is over its bound, or the rank is not named."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            (Path(folder) / f"dump_{rank}").write_bytes(pickle.dumps(dump(rank, num_ranks, num_entries)))
        began = time.monotonic()
        words = ["-m", "distlab", "check", "--dump", folder, "--repro", f"{folder}/repro.py"]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        took_s = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    named = f"for rank {LATE}" in " ".join(done.stdout.split())
    print(done.stdout, done.stderr)
    bounds = [f"{took_s:.1f} / {MOST_S:g} s", f"{peak / 1e6:.0f} / {MOST_BYTES / 1e6:.0f} MB", "yes" if named else "NO"]
    print(table(["ranks", "entries", "time", "memory", "the rank is named"], [[num_ranks, num_entries, *bounds]]))
    return int(took_s > MOST_S or peak > MOST_BYTES or not named)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
