"""Our stacked axes against PyTorch's: `python -m benchmarks.mesh [ROUNDS]`.

A GPT of four layers of width 512 takes whole training steps of 4 samples of 128 bytes on dp 2 x tp 2, beside
parallelize_module and fully_shard over its DTensors. Figures are over theirs, below 1 is faster or less; what a step
sends and the most that it holds come from the ledgers of a whole run.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fsdp import judged, most
from benchmarks.rounds import Ratio, Timing, interleave, on_ranks, table
from benchmarks.runs import run_lab
from distlab.config import Config
from distlab.experiments.mesh import MODE
from distlab.mesh.grid import Mesh
from distlab.workload.data import Batches
from distlab.workload.model import build_model

OURS, THEIRS = ("1f1b", "sequence", "zero1", "zero2", "zero3"), "dtensor_fsdp2"
TARGETS = {"step": 0.60, "wire": 0.60, "peak": 1.00}  # zero2's, which shards gradients and gathers weights once
WORLD_SIZE = 4
SIZES = {
    "RUN_MODE": "mesh", "WORLD_SIZE": str(WORLD_SIZE), "LAB_MESH": "dp2,tp2", "LAB_WIDTH": "512", "LAB_DEPTH": "4",
    "LAB_SEQ": "128", "LAB_BATCH": "4", "LAB_MICROBATCHES": "1", "LAB_VARIANT": ",".join((*OURS, THEIRS)),
}  # fmt: skip


def measure(group: dist.ProcessGroup, rounds: int) -> dict[str, Timing]:
    """Whole steps of each variant, interleaved."""
    config = Config.read(SIZES)
    mesh = Mesh.grid(MODE.axes(config), group)
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    microbatches = batches.dealt(0, mesh.index("dp"), mesh.size("dp"))
    builds = {variant.name: variant.build for variant in MODE.variants if variant.build is not None}

    def step_of(name: str) -> Callable[[], None]:
        strategy = builds[name](build_model(config, config.seed), mesh, config)

        def step() -> None:
            strategy.backward(microbatches)
            strategy.update()

        return step

    return interleave({name: step_of(name) for name in (*OURS, THEIRS)}, group, rounds)


def lab_run() -> dict[str, Any]:
    """What a whole run counted; it is not proven here (benchmarks.proof does that)."""
    with tempfile.TemporaryDirectory() as folder:
        return run_lab(Path(folder), **SIZES, LAB_PROOF=0, LAB_STEPS=1)


def main(rounds: int = 15) -> None:
    """Print steps, wire bytes and peaks over theirs, then those of zero2 beside the targets."""
    timings, run = on_ranks(WORLD_SIZE, measure, rounds), lab_run()
    theirs, rows, decided = timings[THEIRS], [], {}
    for name in OURS:
        wall, cpu = (Ratio.of(getattr(timings[name], kind), getattr(theirs, kind)) for kind in ("wall_s", "cpu_s"))
        wire, peak = (most(run, name, source) / most(run, THEIRS, source) for source in ("wire_bytes", "peak_by_class"))
        decided[name] = (wall.median, wire, peak)
        rows.append([name, f"{timings[name].median_s * 1e3:.0f}", wall, cpu, f"{wire:.2f}x", f"{peak:.2f}x"])
    print(
        f"dp 2 x tp 2 on {WORLD_SIZE} ranks of one thread each, over {THEIRS} ({theirs.median_s * 1e3:.0f} ms a step)"
    )
    print(table(["variant", "ms a step", "wall", "CPU", "wire", "peak"], rows))
    ratios = zip(TARGETS.items(), decided["zero2"], strict=True)
    print(
        table(
            ["zero2's", "ratio", "target", "held"],
            [[what, f"{seen:.2f}x", *judged(seen, limit, "x")] for (what, limit), seen in ratios],
        )
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
