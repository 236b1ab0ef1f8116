"""Strategies by hand over plain TCP against PyTorch's over gloo: `python -m benchmarks.over_tcp [ROUNDS]`.

Whole training steps, interleaved, of four candidates: PyTorch's strategy and ours, each over gloo and over plain TCP.
Figures are times over PyTorch's over gloo: below 1 is faster. CPU seconds are those of all ranks together, and the
steadier figure where ranks share cores.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import benchmarks.mesh
from benchmarks.rounds import Ratio, Timing, interleave, on_ranks, table
from distlab.config import Config
from distlab.contract import Mode
from distlab.experiments import dp, fsdp, mesh, tp
from distlab.mesh.grid import Mesh
from distlab.transport.process_group import TcpBackend
from distlab.workload.data import Batches
from distlab.workload.model import build_model


class Pair(NamedTuple):
    """A strategy of ours beside PyTorch's, and what its step over plain TCP may take of PyTorch's over gloo."""

    mode: Mode
    ranks: tuple[int, ...]
    ours: str
    theirs: str
    sizes: dict[str, str]
    target: float


WIDE = {"LAB_WIDTH": "320"}  # a GPT of 10M parameters
PAIRS = {
    "dp": Pair(dp.MODE, (2, 4), "bucketed", "ddp", WIDE | {"LAB_BUCKET_MIB": "25"}, 0.95),
    "tp": Pair(tp.MODE, (2, 4), "megatron", "dtensor", {"LAB_WIDTH": "128", "LAB_BATCH": "4"}, 0.50),
    "fsdp": Pair(fsdp.MODE, (2, 4), "zero3", "fsdp2", WIDE | {"LAB_OPTIMIZER": "adamw"}, 0.55),
    "mesh": Pair(mesh.MODE, (4,), "zero2", "dtensor_fsdp2", benchmarks.mesh.SIZES, benchmarks.mesh.TARGETS["step"]),
}
WARMUP_STEPS = 2  # DDP lays its buckets out anew after the first


def measure(world: dist.ProcessGroup, mode: str, rounds: int) -> dict[str, Timing]:
    """Whole steps of the four, interleaved."""
    pair = PAIRS[mode]
    samples = {"LAB_BATCH": str(2 * world.size())} | pair.sizes
    config = Config.read({"RUN_MODE": mode, "WORLD_SIZE": str(world.size())} | samples)
    TcpBackend("127.0.0.1", b"a benchmark").register()
    worlds = {"gloo": world, "tcp": dist.new_group(backend="tcp")}
    grids = {carrier: Mesh.grid(pair.mode.axes(config), group) for carrier, group in worlds.items()}
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    microbatches = batches.dealt(0, grids["gloo"].index("dp"), grids["gloo"].size("dp"))
    builds = {variant.name: variant.build for variant in pair.mode.variants if variant.build is not None}

    def step_of(name: str, grid: Mesh) -> Callable[[], None]:
        strategy = builds[name](build_model(config, config.seed), grid, config)

        def step() -> None:
            strategy.backward(microbatches)
            strategy.update()

        return step

    candidates = [(name, carrier) for name in (pair.theirs, pair.ours) for carrier in grids]
    steps = {f"{name} over {carrier}": step_of(name, grids[carrier]) for name, carrier in candidates}
    for step in [step for step in steps.values() for _ in range(WARMUP_STEPS)]:
        step()
    return interleave(steps, world, rounds)


def rows_of(mode: str, world_size: int, rounds: int) -> list[list[Any]]:
    """A row for each candidate."""
    pair = PAIRS[mode]
    timings = on_ranks(world_size, measure, mode, rounds)
    theirs, rows = timings[f"{pair.theirs} over gloo"], []
    for name, timing in timings.items():
        wall, cpu = Ratio.of(timing.wall_s, theirs.wall_s), Ratio.of(timing.cpu_s, theirs.cpu_s)
        judged = ["-", "-"]
        if name == f"{pair.ours} over tcp":
            judged = [f"{pair.target:.2f}x", "yes" if round(wall.median, 2) <= pair.target else "NO"]
        rows.append([mode, world_size, name, f"{timing.median_s * 1e3:.1f}", wall, f"{cpu.median:.2f}x", *judged])
    return rows


def main(rounds: int = 21) -> None:
    """Print one table, targets beside the ratios."""
    rows = [
        row for mode, pair in PAIRS.items() for world_size in pair.ranks for row in rows_of(mode, world_size, rounds)
    ]
    print("one thread a rank: a step's time over PyTorch's over gloo (median, and the middle half of the rounds)")
    print(table(["mode", "ranks", "variant", "ms a step", "wall", "CPU", "target", "held"], rows))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
