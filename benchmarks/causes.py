"""What lies behind ratios that miss their targets: `python -m benchmarks.causes [ROUNDS]`.

A layer of benchmarks.pp behind the sleep that pretends its compute and awake; pipelines over plain TCP, awake, against
PyTorch's over gloo; and the two halves of a sum of RUN_MODE=mesh, which sequence parallelism makes, against a whole
one and against a reduce_scatter of sends and receives; both pairs of ranks of dp 2 x tp 2 are at it.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import pp
from benchmarks.rounds import Timing, interleave, on_ranks, ratios, table
from distlab.collectives.by_hand import Collective
from distlab.tensor_parallel.layers import Sequence
from distlab.transport.process_group import TcpBackend

SLEEP_S = 0.010  # LAB_SLEEP_MS of benchmarks.pp
LAYER_CALLS, SUM_CALLS = 40, 20
SUM_BYTES = 512 << 10  # activations of benchmarks.steps mesh: 2 samples of 128 positions of width 512
PIPES = ("1f1b_split over tcp", "1f1b_split over gloo", "torch_1f1b over gloo")


def layers(_: dist.ProcessGroup) -> list[list[str]]:
    """Median CPU ms of this thread for a layer of benchmarks.pp, forward and backward: awake, and behind a sleep."""
    layer, samples = nn.Linear(64, 64), torch.randn(8, 64)

    def cpu_ms(sleep_s: float) -> tuple[float, float]:
        forwards, backwards = [], []
        for _ in range(LAYER_CALLS):
            forward_s, out = cpu_s(sleep_s, lambda: layer(samples))
            backward_s, _ = cpu_s(sleep_s, out.sum().backward)
            forwards.append(forward_s * 1e3)
            backwards.append(backward_s * 1e3)
        return statistics.median(forwards), statistics.median(backwards)

    awake, asleep = cpu_ms(0.0), cpu_ms(SLEEP_S)
    passes = zip(("forward", "backward"), awake, asleep, strict=True)
    return [[name, f"{before:.2f}", f"{behind:.2f}"] for name, before, behind in passes]


def cpu_s(sleep_s: float, call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """CPU seconds of this thread for one call, behind a sleep, and what it returned."""
    if sleep_s:
        time.sleep(sleep_s)
    began_s = time.thread_time()
    returned = call()
    return time.thread_time() - began_s, returned


def pipelines(world: dist.ProcessGroup, rounds: int) -> dict[str, Timing]:
    """Steps without pretended compute, by carrier."""
    TcpBackend("127.0.0.1", b"a benchmark").register()
    groups = {"tcp": dist.new_group(backend="tcp"), "gloo": world}
    config = pp.settings(LAB_MODEL="mlp", LAB_WIDTH="64", LAB_BATCH="64", LAB_SLEEP_MS="0")
    steps = {}
    for name in PIPES:
        variant, _, carrier = name.partition(" over ")
        steps[name] = pp.step_of(variant, groups[carrier], config, pp.thin_model(config), [])
    return interleave(steps, world, rounds)


def sums(world: dist.ProcessGroup, rounds: int) -> dict[str, Timing]:
    """A whole sum of two ranks and its halves, while two other ranks do the same."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[world.rank() // 2]
    halves, messages = Sequence(pair), Collective(pair, "direct")  # as the mesh makes them; and before
    whole, half = torch.ones(SUM_BYTES // 4), torch.ones(SUM_BYTES // 8)
    candidates: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=pair),
        "reduce_scatter by messages": lambda: messages.reduce_scatter(half, whole),
        "reduce_scatter by all_to_all": lambda: halves.scattering.reduce_scatter(half, whole),
        "all_gather": lambda: halves.gathering.all_gather(whole, half),
    }
    return interleave(candidates, world, rounds, SUM_CALLS)


def main(rounds: int = 15) -> None:
    """Print the three tables."""
    print("CPU ms of a linear layer of 64 x 64 and 8 samples, medians")
    print(table(["pass", "awake", f"behind a sleep of {SLEEP_S * 1e3:.0f} ms"], on_ranks(1, layers)))
    seen = on_ranks(pp.RANKS, pipelines, 4 * rounds)
    theirs, rows = seen["torch_1f1b over gloo"], []
    for name, timing in seen.items():
        rows.append([name, f"{timing.median_s * 1e3:.1f}", *ratios(timing, theirs)])
    print("\npipelines awake, times over torch_1f1b's over gloo")
    print(table(["variant", "ms a step", "wall", "CPU"], rows))
    print(f"\na sum of {SUM_BYTES >> 10} KiB by two ranks over gloo, two others at it too, medians")
    halves = on_ranks(4, sums, rounds)
    print(table(["operation", "ms"], [[name, f"{timing.median_s * 1e3:.1f}"] for name, timing in halves.items()]))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
