"""Our context parallelism against PyTorch's ring functions: `python -m benchmarks.cp [ROUNDS]`.

Attention alone, forward and backward, of 8 heads of 32 numbers and one sample, at 2 and at 4 ranks and two lengths.
Figures are times over those of PyTorch's functions with their default rotation, an all_gather: below 1 is faster. Of
the bytes of K and V of all positions, `sent` is what a rank sends by the formula, and `kept` what autograd keeps on
rank 0 for the backward pass.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rounds import Timing, interleave, judge, on_ranks, ratios, table
from distlab.experiments.cp import GatheredAttention, TorchRing
from distlab.experiments.cp.predictions import BY_HAND, layer_cost, positions_of
from distlab.lab.config import Config
from distlab.lab.measure.storages import SavedActivations
from distlab.lab.workload.model import Attend
from distlab.techniques.context_parallel.ring import RingAttention
from distlab.techniques.context_parallel.ulysses import UlyssesAttention

HEADS, HEAD_DIM = 8, 32
LENGTHS = (512, 2048)
TORCHS = "torch_ring"
CPU_TARGETS = {"zigzag": (1.0,), "ulysses": (0.9,)}  # of PyTorch's, at 4 ranks and 2048 positions
JUDGED = (4, 2048)


def config_of(world_size: int, length: int) -> Config:
    """The settings whose predictions are these sizes'."""
    sizes = {"LAB_SEQ": length, "LAB_HEADS": HEADS, "LAB_WIDTH": HEADS * HEAD_DIM, "LAB_BATCH": 1}
    return Config.read({"RUN_MODE": "cp", "WORLD_SIZE": str(world_size)} | {key: str(sizes[key]) for key in sizes})


def attends(group: dist.ProcessGroup, config: Config) -> dict[str, Attend]:
    """Each way to attend."""
    at = {name: positions_of(name, config) for name in (*BY_HAND, TORCHS)}
    return {
        "gathered": GatheredAttention(group, at["gathered"]),
        "ring": RingAttention(group, at["ring"]),
        "zigzag": RingAttention(group, at["zigzag"]),
        "ulysses": UlyssesAttention(group, at["ulysses"]),
        TORCHS: TorchRing(group, at[TORCHS]),
    }


def measure(group: dist.ProcessGroup, length: int, rounds: int) -> tuple[dict[str, Timing], dict[str, int]]:
    """Steps of each, interleaved, and the bytes that each keeps on this rank."""
    config, generator = config_of(group.size(), length), torch.Generator().manual_seed(1)
    whole = torch.randn(4, 1, HEADS, length, HEAD_DIM, generator=generator)
    ways, steps, kept = attends(group, config), dict[str, Callable[[], None]](), dict[str, int]()
    for name, attend in ways.items():
        rows = positions_of(name, config).of(group.rank())
        mine = [each[:, :, rows].requires_grad_() for each in whole[:3].unbind()]
        steps[name] = step_of(attend, mine, whole[3, :, :, rows])
        with SavedActivations() as saved:
            steps[name]()
        kept[name] = saved.peak_bytes
    return interleave(steps, group, rounds), kept


def step_of(attend: Attend, mine: list[Tensor], gradient: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def step() -> None:
        for leaf in mine:
            leaf.grad = None
        attend(*mine).backward(gradient)

    return step


def main(rounds: int = 11) -> None:
    """Print a table for each number of ranks and length, targets beside the ratios."""
    for world_size in (2, 4):
        for length in LENGTHS:
            timings, kept = on_ranks(world_size, measure, length, rounds)
            config, everything = config_of(world_size, length), 2 * length * HEADS * HEAD_DIM * 4
            rows = []
            for name, timing in timings.items():
                wall, cpu = ratios(timing, timings[TORCHS])
                target = judge([cpu], CPU_TARGETS.get(name, ()) if (world_size, length) == JUDGED else (), "x CPU")
                sent = f"{layer_cost(name, config, 1, 0).nbytes / everything:.2f}"
                share = f"{kept[name] / everything:.2f}"
                rows.append([name, f"{timing.median_s * 1e3:.1f}", sent, share, wall, cpu, *target])
            print(
                f"{world_size} ranks, {length} positions, one thread each: a step's time over PyTorch's ring functions"
            )
            print(table(["variant", "ms a step", "sent", "kept", "wall", "CPU", "target", "held"], rows))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
