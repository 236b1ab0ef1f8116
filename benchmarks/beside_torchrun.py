"""Seconds of a training under `distlab check` beside torchrun: until it begins, of its steps, until all has ended.

    python -m benchmarks.beside_torchrun [ROUNDS]

The two take turns. Both train for so many steps as take torchrun's ranks TRAINED_S.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rounds import table

TRAINED_S, CALIBRATING_STEPS, TIMEOUT_S = 30.0, 800, 300.0
WORLD_SIZES = (2, 4)
PHASES = ("begins after", "trains for", "ends after")
TRAINING = """
import os, sys, time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
begun = time.time()
torch.manual_seed(dist.get_rank())
model = DDP(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    with open(os.environ["TIMES"], "w") as file:
        file.write(f"{begun} {time.time()}")
dist.destroy_process_group()
"""


def main(rounds: int = 3) -> None:
    """Print a row for each number of ranks."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "training.py").write_text(TRAINING)
        for world_size in WORLD_SIZES:
            _, trained_s, _ = run(torchrun(world_size), folder, CALIBRATING_STEPS, world_size)
            steps = round(CALIBRATING_STEPS * TRAINED_S / trained_s)
            pairs = [
                [run(command(world_size), folder, steps, world_size) for command in COMMANDS] for _ in range(rounds)
            ]
            theirs, ours = (
                [statistics.median(each) for each in zip(*runs, strict=True)] for runs in zip(*pairs, strict=True)
            )
            phases = [f"{each[phase]:.1f}" for phase in range(len(PHASES)) for each in (theirs, ours)]
            rows.append([world_size, *phases, f"{ours[1] / theirs[1]:.2f}", f"{ours[2] / theirs[2]:.2f}"])
    columns = [f"{who} {phase}, s" for phase in PHASES for who in ("torchrun", "check")]
    print(table(["ranks", *columns, "steps over torchrun's", "all over torchrun's"], rows))


def torchrun(world_size: int) -> list[str]:
    """Its command, without the script."""
    return ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]


def check(world_size: int) -> list[str]:
    """The same of `distlab check`."""
    return ["distlab", "check", f"WORLD_SIZE={world_size}"]


COMMANDS = (torchrun, check)


def run(command: Sequence[str], folder: Path, steps: int, world_size: int) -> tuple[float, float, float]:
    """Seconds until the ranks have met, from there to the last step, and until all has ended."""
    times = folder / "times"
    given = {"TIMES": str(times), "LAB_RUNS_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", *command, str(folder / "training.py"), str(steps)]
    started = time.time()
    done = subprocess.run(words, env=os.environ | given, timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)} on {world_size} ranks ended with {done.returncode}:"
            f" {(done.stdout + done.stderr)[-2000:]}"
        )
    begun, trained = map(float, times.read_text().split())
    return begun - started, trained - begun, ended - started


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
