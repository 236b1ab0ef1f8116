"""Our tensor parallelism against PyTorch's: `python -m benchmarks.tp [ROUNDS]`.

A GPT of four layers of width 512 takes whole training steps of 4 samples of 128 bytes with each variant at 2 and at 4
ranks. Figures are times over DTensor's: below 1 is faster. CPU seconds are those of all ranks together, and the
steadier figure where ranks share cores.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.rounds import Ratio, Timing, interleave, on_ranks, table
from distlab.config import Config
from distlab.experiments.tp import MODE
from distlab.mesh.grid import Mesh
from distlab.workload.data import Batches
from distlab.workload.model import build_model

VARIANTS = ("megatron", "sequence", "dtensor")
TARGETS = {
    (2, "megatron"): 0.85,
    (4, "megatron"): 0.74,
    (2, "sequence"): 0.90,
    (4, "sequence"): 0.80,
}  # of DTensor's step
SIZES = {"LAB_WIDTH": "512", "LAB_DEPTH": "4", "LAB_SEQ": "128", "LAB_BATCH": "4"}


def measure(group: dist.ProcessGroup, variants: tuple[str, ...], rounds: int) -> dict[str, Timing]:
    """Whole steps of each variant, interleaved."""
    config = Config.read({"RUN_MODE": "tp", "WORLD_SIZE": str(group.size())} | SIZES)
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    microbatches = batches.dealt(0, 0, 1)

    builds = {variant.name: variant.build for variant in MODE.variants if variant.build is not None}

    def step_of(name: str) -> Callable[[], None]:
        strategy = builds[name](build_model(config, config.seed), Mesh({"tp": group}), config)

        def step() -> None:
            strategy.backward(microbatches)
            strategy.update()

        return step

    return interleave({name: step_of(name) for name in variants}, group, rounds)


def main(rounds: int = 15) -> None:
    """Print a table for each number of ranks, targets beside the ratios."""
    for world_size in (2, 4):
        timings = on_ranks(world_size, measure, VARIANTS, rounds)
        dtensor, rows = timings["dtensor"], []
        for name, timing in timings.items():
            wall, cpu = Ratio.of(timing.wall_s, dtensor.wall_s), Ratio.of(timing.cpu_s, dtensor.cpu_s)
            limit = TARGETS.get((world_size, name))
            target, held = (f"{limit:.2f}x", "yes" if wall.median <= limit else "NO") if limit else ("-", "-")
            rows.append([name, f"{timing.median_s * 1e3:.0f}", wall, cpu, target, held])
        print(
            f"{world_size} ranks, one thread each: a step's time over DTensor's "
            "(median, and the middle half of the rounds)"
        )
        print(table(["variant", "ms a step", "wall", "CPU", "target", "held"], rows))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
