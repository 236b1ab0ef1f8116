"""Our sharded data parallelism against PyTorch's: `python -m benchmarks.fsdp [ROUNDS]`.

A GPT of 10M parameters takes whole training steps with AdamW, 2 samples of 64 bytes a rank. Steps are interleaved at 2
and at 4 ranks; figures are over fully_shard's, below 1 is faster or less. Bytes come from the ledgers of whole runs: on
the wire and at rest over the formula, for 1 to 8 ranks, and the most that a step holds.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rounds import Ratio, Timing, interleave, on_ranks, table
from benchmarks.runs import run_lab
from distlab.config import Config
from distlab.experiments import fsdp
from distlab.mesh.grid import Mesh
from distlab.workload.data import Batches
from distlab.workload.model import build_model

OURS, THEIRS = ("zero1", "zero2", "zero3"), "fsdp2"
STEP_TARGET = 0.65  # zero3's, of fully_shard's
PEAK_TARGET = 1.03  # zero3's, of fully_shard's
WIRE_TARGET = 0.75  # zero3's, of fully_shard's over gloo
OFF_TARGET = 0.01  # from the formulas
Row = list[Any]


def settings(world_size: int) -> dict[str, str]:
    """A GPT of 10M parameters, AdamW."""
    return {
        "RUN_MODE": "fsdp", "WORLD_SIZE": str(world_size), "LAB_WIDTH": "320", "LAB_BATCH": str(2 * world_size),
        "LAB_OPTIMIZER": "adamw",
    }  # fmt: skip


def measure(group: dist.ProcessGroup, rounds: int) -> dict[str, Timing]:
    """Whole steps of each variant, interleaved."""
    config = Config.read(settings(group.size()))
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    microbatches = batches.dealt(0, group.rank(), group.size())

    def step_of(name: str) -> Callable[[], None]:
        strategy = getattr(fsdp, name)(build_model(config, config.seed), Mesh({"dp": group}), config)

        def step() -> None:
            strategy.backward(microbatches)
            strategy.update()

        return step

    return interleave({name: step_of(name) for name in (*OURS, THEIRS)}, group, rounds)


def step_rows(world_size: int, rounds: int) -> list[Row]:
    """A row a variant: its step, wall and CPU, over fully_shard's."""
    timings = on_ranks(world_size, measure, rounds)
    theirs, rows = timings[THEIRS], []
    for name, timing in timings.items():
        wall, cpu = Ratio.of(timing.wall_s, theirs.wall_s), Ratio.of(timing.cpu_s, theirs.cpu_s)
        target = judged(wall.median, STEP_TARGET, "x") if name == "zero3" else ["-", "-"]
        rows.append([name, f"{timing.median_s * 1e3:.0f}", wall, cpu, *target])
    return rows


def judged(seen: float, limit: float, unit: str = "") -> list[str]:
    """A target, and whether it is held."""
    return [f"{limit:.2f}{unit}", "yes" if seen <= limit else "NO"]


def lab_run(world_size: int) -> dict[str, Any]:
    """What a whole run counted; it is not proven here (benchmarks.proof does that)."""
    with tempfile.TemporaryDirectory() as folder:
        return run_lab(Path(folder), **settings(world_size), LAB_PROOF=0, LAB_STEPS=1)


def most(run: dict[str, Any], variant: str, source: str) -> float:
    """The largest figure of a variant over its ranks; a peak or a rest by class as its sum."""
    (found,) = [entry for entry in run["variants"] if entry["name"] == variant]
    return max(sum(each.values()) if isinstance(each, dict) else each for each in found[source])


def ratio_rows(world_size: int, run: dict[str, Any]) -> list[Row]:
    """Peaks and wire bytes against each other."""
    pairs = [
        ("peak", "peak_by_class", "zero3", THEIRS, PEAK_TARGET),
        ("peak", "peak_by_class", "zero2", "zero1", 1.0),
        ("wire", "wire_bytes", "zero3", THEIRS, WIRE_TARGET),
    ]
    rows = []
    for what, source, one, other, limit in pairs:
        mine, others = most(run, one, source), most(run, other, source)
        shown = f"{mine / 1e6:.1f} / {others / 1e6:.1f}"
        rows.append(
            [
                world_size,
                f"{what} of {one} over {other}",
                shown,
                f"{mine / others:.3f}x",
                *judged(mine / others, limit, "x"),
            ]
        )
    return rows


def formula_row(world_size: int, run: dict[str, Any]) -> Row:
    """How far the wire and the memory at rest are off the formulas, each at the variant that is farthest off."""
    off = {"wire bytes": 0.0, "rest bytes": 0.0}
    for entry in run["comparisons"]:
        if entry["name"] in off and entry["variant"] in OURS and entry["predicted"]:
            off[entry["name"]] = max(off[entry["name"]], abs(entry["measured"] / entry["predicted"] - 1))
    return [
        world_size,
        *(f"{value:.2%}" for value in off.values()),
        *judged(max(off.values()) * 100, OFF_TARGET * 100, " %"),
    ]


def main(rounds: int = 15) -> None:
    """Print steps, ratios of bytes, and how far all bytes are off the formulas, targets beside them."""
    for world_size in (2, 4):
        figures = "(median, and the middle half of the rounds)"
        print(f"{world_size} ranks, one thread each: a step's time over fully_shard's {figures}")
        print(table(["variant", "ms a step", "wall", "CPU", "target", "held"], step_rows(world_size, rounds)))
    runs = {world_size: lab_run(world_size) for world_size in range(1, 9)}
    print("the most that a step of one rank holds, and what it sends, MB")
    columns = ["ranks", "what", "MB", "ratio", "target", "held"]
    print(table(columns, [row for world_size in (2, 4) for row in ratio_rows(world_size, runs[world_size])]))
    print("off the formulas, of zero1, zero2 and zero3 the one that is farthest off")
    print(table(["ranks", "wire", "at rest", "at most", "held"], [formula_row(*item) for item in runs.items()]))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
