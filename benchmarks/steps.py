"""Whole training steps by hand against PyTorch's: `python -m benchmarks.steps [dp|fsdp|tp|mesh|tcp ...] [ROUNDS]`.

Steps of all variants are interleaved. Figures are times over PyTorch's strategy over gloo: below 1 is faster. CPU
seconds are those of all ranks together, and the steadier figure where ranks share cores. Communication weighs as much
as it can: a GPT of 10M parameters and 2 samples of 64 bytes a rank (dp, fsdp with AdamW), four layers of width 512 and
4 samples of 128 bytes (tp, and dp 2 x tp 2 of mesh). `tcp` has a strategy of each mode over gloo and over plain TCP.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.rounds import Timing, interleave, judge, on_ranks, ratios, table
from distlab.lab.config import Config
from distlab.lab.rank.mode_loader import load
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import build_model
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.transport.process_group import TcpBackend

WARMUP_STEPS = 2  # DDP lays its buckets out anew after the first


class Comparison(NamedTuple):
    """Strategies of one mode, `theirs` among them, and what a step of ours may take of theirs: wall and CPU."""

    mode: str
    ranks: tuple[int, ...]
    variants: tuple[str, ...]
    theirs: str
    sizes: dict[str, str]
    targets: dict[tuple[int, str], tuple[float, ...]]  # by number of ranks and row
    carriers: tuple[str, ...] = ("gloo",)


WIDE = {"LAB_WIDTH": "320"}  # a GPT of 10M parameters
DP_SIZES = WIDE | {"LAB_BUCKET_MIB": "25"}  # buckets of DDP's own size
FSDP_SIZES = WIDE | {"LAB_OPTIMIZER": "adamw"}
LAYERS = {"LAB_WIDTH": "512", "LAB_DEPTH": "4", "LAB_SEQ": "128", "LAB_BATCH": "4"}
MESH_SIZES = LAYERS | {"LAB_MESH": "dp2,tp2", "LAB_MICROBATCHES": "1"}
MESH_VARIANTS = ("1f1b", "sequence", "zero1", "zero2", "zero3", "dtensor_fsdp2")
BOTH = ("gloo", "tcp")
COMPARISONS = {
    "dp": [
        Comparison(
            "dp", (2, 4), ("per_parameter", "flat", "bucketed", "ring", "ddp"), "ddp", DP_SIZES,
            {(2, "bucketed"): (1.00, 1.00), (4, "ring"): (0.97,)},
        )
    ],
    "fsdp": [
        Comparison(
            "fsdp", (2, 4), ("zero1", "zero2", "zero3", "fsdp2"), "fsdp2", FSDP_SIZES,
            {(2, "zero3"): (0.65,), (4, "zero3"): (0.65,)},
        )
    ],
    "tp": [
        Comparison(
            "tp", (2, 4), ("megatron", "sequence", "dtensor"), "dtensor", LAYERS,
            {
                (2, "megatron"): (0.85,), (4, "megatron"): (0.74,), (2, "sequence"): (0.90,), (4, "sequence"): (0.80,)
            },
        )
    ],
    "mesh": [
        # zero2 shards gradients and gathers weights once
        Comparison("mesh", (4,), MESH_VARIANTS, "dtensor_fsdp2", MESH_SIZES, {(4, "zero2"): (0.60,)})
    ],
    "tcp": [
        Comparison(
            mode, ranks, (theirs, ours), theirs, sizes, {(num, f"{ours} over tcp"): (target,) for num in ranks}, BOTH
        )
        for mode, ranks, ours, theirs, sizes, target in (
            ("dp", (2, 4), "bucketed", "ddp", DP_SIZES, 0.95),
            ("tp", (2, 4), "megatron", "dtensor", {"LAB_WIDTH": "128", "LAB_BATCH": "4"}, 0.50),
            ("fsdp", (2, 4), "zero3", "fsdp2", FSDP_SIZES, 0.55),
            ("mesh", (4,), "zero2", "dtensor_fsdp2", MESH_SIZES, 0.60),
        )
    ],
}  # fmt: skip


def settings(mode: str, world_size: int, sizes: dict[str, str]) -> dict[str, str]:
    """The variables of a run of this mode: 2 samples a rank where `sizes` say nothing else."""
    return {"RUN_MODE": mode, "WORLD_SIZE": str(world_size), "LAB_BATCH": str(2 * world_size)} | sizes


def step_of(variant: str, grid: Mesh, config: Config) -> Callable[[], None]:
    """One training step of a variant on its first batch."""
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    microbatches = batches.microbatches(0, grid.index("dp"), grid.size("dp"))
    (build,) = [each.build for each in load(config.run_mode).variants if each.name == variant]
    assert build is not None
    strategy = build(build_model(config, config.seed), grid, config)

    def step() -> None:
        strategy.backward(microbatches)
        strategy.update()

    return step


def measure(world: dist.ProcessGroup, name: str, index: int, rounds: int) -> dict[str, Timing]:
    """Whole steps of all variants over all carriers, interleaved."""
    compared = COMPARISONS[name][index]
    config = Config.read(settings(compared.mode, world.size(), compared.sizes))
    TcpBackend("127.0.0.1", b"a benchmark").register()
    worlds = {"gloo": world} | ({"tcp": dist.new_group(backend="tcp")} if "tcp" in compared.carriers else {})
    grids = {carrier: Mesh.grid(load(compared.mode).axes(config), group) for carrier, group in worlds.items()}
    steps = {
        row_name(compared, variant, carrier): step_of(variant, grid, config)
        for variant in compared.variants
        for carrier, grid in grids.items()
    }
    for step in [step for step in steps.values() for _ in range(WARMUP_STEPS)]:
        step()
    return interleave(steps, world, rounds)


def row_name(compared: Comparison, variant: str, carrier: str) -> str:
    """The variant, and its carrier where there are two."""
    return f"{variant} over {carrier}" if len(compared.carriers) > 1 else variant


def rows_of(name: str, index: int, world_size: int, rounds: int) -> list[list[Any]]:
    """A row for each variant and carrier."""
    compared = COMPARISONS[name][index]
    timings = on_ranks(world_size, measure, name, index, rounds)
    theirs, rows = timings[row_name(compared, compared.theirs, "gloo")], []
    for row, timing in timings.items():
        found = ratios(timing, theirs)
        target = judge(found, compared.targets.get((world_size, row), ()))
        rows.append([compared.mode, world_size, row, f"{timing.median_s * 1e3:.1f}", *found, *target])
    return rows


def main(*words: str) -> None:
    """Print one table for each comparison, targets beside the ratios."""
    rounds = int(words[-1]) if words and words[-1].isdecimal() else 15
    for name in [word for word in words if not word.isdecimal()] or COMPARISONS:
        rows = [
            row
            for index, compared in enumerate(COMPARISONS[name])
            for world_size in compared.ranks
            for row in rows_of(name, index, world_size, rounds)
        ]
        print(f"one thread a rank: a step's time over {'PyTorch over gloo' if name == 'tcp' else rows[-1][2]}'s")
        print(table(["mode", "ranks", "variant", "ms a step", "wall", "CPU", "target", "held"], rows), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
