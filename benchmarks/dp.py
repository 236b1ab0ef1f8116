"""Our data parallelism against PyTorch's: `python -m benchmarks.dp [ROUNDS]`.

A GPT of 10M parameters takes whole training steps with each variant at 2 and at 4 ranks, 2 samples of 64 bytes a rank,
so that communication weighs as much as it can. Figures are times over DDP's: below 1 is faster. CPU seconds are those
of all ranks together, and the steadier figure where ranks share cores.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.rounds import Ratio, Timing, interleave, on_ranks, table
from distlab.config import Config
from distlab.experiments import dp
from distlab.mesh.grid import Mesh
from distlab.workload.data import Batches
from distlab.workload.model import build_model

VARIANTS = ("naive", "flat", "bucketed", "ring", "ddp")
TARGETS = {(2, "bucketed"): (1.00, 1.00), (4, "ring"): (0.97, None)}  # (ranks, variant): times DDP's wall and CPU
WARMUP_STEPS = 2  # DDP lays its buckets out anew after the first


def settings(world_size: int) -> Config:
    """A GPT of 10M parameters, in buckets of DDP's own size."""
    sizes = {"LAB_WIDTH": "320", "LAB_BATCH": str(2 * world_size), "LAB_BUCKET_MIB": "25"}
    return Config.read({"RUN_MODE": "dp", "WORLD_SIZE": str(world_size)} | sizes)


def measure(group: dist.ProcessGroup, variants: tuple[str, ...], rounds: int) -> dict[str, Timing]:
    """Whole steps of each variant, interleaved."""
    config = settings(group.size())
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    microbatches = batches.dealt(0, group.rank(), group.size())

    def step_of(name: str) -> Callable[[], None]:
        strategy = getattr(dp, name)(build_model(config, config.seed), Mesh({"dp": group}), config)

        def step() -> None:
            strategy.backward(microbatches)
            strategy.update()

        return step

    steps = {name: step_of(name) for name in variants}
    for step in [step for step in steps.values() for _ in range(WARMUP_STEPS)]:
        step()
    return interleave(steps, group, rounds)


def main(rounds: int = 21) -> None:
    """Print a table for each number of ranks, targets beside the ratios."""
    for world_size in (2, 4):
        timings = on_ranks(world_size, measure, VARIANTS, rounds)
        ddp, rows = timings["ddp"], []
        for name, timing in timings.items():
            wall, cpu = Ratio.of(timing.wall_s, ddp.wall_s), Ratio.of(timing.cpu_s, ddp.cpu_s)
            limits = TARGETS.get((world_size, name), (None, None))
            missed = [
                seen
                for seen, limit in zip((wall, cpu), limits, strict=True)
                if limit is not None and seen.median > limit
            ]
            target = " and ".join(
                f"{kind} {limit:.2f}x" for kind, limit in zip(("wall", "CPU"), limits, strict=True) if limit
            )
            rows.append(
                [
                    name,
                    f"{timing.median_s * 1e3:.0f}",
                    wall,
                    cpu,
                    target or "-",
                    ("NO" if missed else "yes") if target else "-",
                ]
            )
        print(
            f"{world_size} ranks, one thread each: a step's time over DDP's (median, and the middle half of the rounds)"
        )
        print(table(["variant", "ms a step", "wall", "CPU", "target", "held"], rows))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
