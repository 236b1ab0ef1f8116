"""How long a checkpoint holds the training up.

`python -m benchmarks.checkpoint [ROUNDS]`

Whole runs of a GPT of 10M parameters with AdamW, sharded by zero3, at 2 and at 4 ranks. The first save of a run, which
imports what it needs, does not count.
The last column is how often to save where a rank is lost every three hours, by Young's formula.
"""

import math
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.rounds import table
from benchmarks.runs import run_lab
from benchmarks.steps import FSDP_SIZES, settings
from distlab.lab.report.reading import read_run
from distlab.lab.report.records import Saved, select

BETWEEN_S = 3 * 3600.0  # two losses
EVERY, STEPS = 8, 32


def young_s(checkpoint_s: float, between_s: float) -> float:
    """The interval of checkpoints with the least loss, to first order: sqrt(2·C·M) (Young 1974); a checkpoint takes C
    seconds, and M are between two losses."""
    return math.sqrt(2 * checkpoint_s * between_s)


def held_s(world_size: int) -> list[float]:
    """Seconds for which each save but the first held up rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        run_lab(
            Path(folder), **settings("fsdp", world_size, FSDP_SIZES), LAB_VARIANT="zero3", LAB_PROOF=0, LAB_STEPS=STEPS,
            LAB_CHECKPOINT_EVERY=EVERY,
        )  # fmt: skip
        saves = [saved for _, saved in select(read_run(Path(folder) / "latest"), Saved)]
    assert all(not saved.error for saved in saves), saves
    return [saved.held_s for saved in saves[1:]]


def main(rounds: int = 3) -> None:
    """A row a number of ranks."""
    rows = []
    for world_size in (2, 4):
        median_s = statistics.median(second for _ in range(rounds) for second in held_s(world_size))
        rows.append([world_size, f"{median_s * 1e3:.0f}", f"{young_s(median_s, BETWEEN_S):.0f}"])
    print(table(["ranks", "ms held up", "s between saves"], rows))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
