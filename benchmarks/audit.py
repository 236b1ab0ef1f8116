"""What an audit of replicas costs: `python -m benchmarks.audit [ROUNDS]`.

A step of `flat` data parallelism at 2 ranks with the default model, bare and audited, in one interleaved run; beside
them the hashes alone, and the same bytes through SHA-256 and a plain copy. An audit every k steps costs a k-th
of what one costs.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.flips import lab_of
from benchmarks.rounds import Timing, interleave, table
from distlab.config import Config
from distlab.measure.tensors import hash_of, raw
from distlab.rank.mode_loader import load
from distlab.testing.warm_ranks import Ranks
from distlab.verify.silent_corruption import KINDS, Corruption, alike

ROUNDS, WORLD_SIZE, VARIANT = 21, 2, "flat"


def measure(group: dist.ProcessGroup, rounds: int) -> tuple[dict[str, Timing], int]:
    """All ways, and the bytes that one audit hashes on a rank."""
    config = Config.read({"RUN_MODE": "dp", "WORLD_SIZE": str(group.size())})
    lab = lab_of(group, config, "audit")
    (build,) = [each.build for each in load("dp").variants if each.name == VARIANT]
    assert build is not None
    strategy = build(lab.model(torch.float32), lab.mesh, config)
    microbatches = lab.dealt(lab.batches(torch.float32), 0)
    corruption = Corruption(lab, {VARIANT: strategy}, every=1)

    def bare() -> None:
        strategy.backward(microbatches)
        strategy.update()

    def audited() -> None:
        strategy.backward(microbatches)
        corruption.hash("gradients", VARIANT, strategy, 0)
        strategy.update()
        corruption.hash("weights", VARIANT, strategy, 0)
        corruption.compare(VARIANT, 0)

    bare()
    tensors = [tensor for kind in KINDS for _, tensor in alike(strategy, kind)]

    def each(call: Callable[[Tensor], Any]) -> Callable[[], Any]:
        return lambda: [call(tensor) for tensor in tensors]

    ways = {
        "a step": bare,
        "a step and its audit": audited,
        "the hashes alone": each(hash_of),
        "SHA-256 instead": each(lambda tensor: hashlib.sha256(raw(tensor)).digest()),
        "a copy of the bytes": each(torch.clone),
    }
    return interleave(ways, group, rounds), sum(tensor.nbytes for tensor in tensors)


def main(rounds: int = ROUNDS) -> None:
    """Print each way, and its share of a step."""
    ranks = Ranks(str(Path.cwd()), ["tests.preloaded"])
    timings, nbytes = ranks(WORLD_SIZE, measure, rounds, timeout_s=600)[0]
    ranks.close()
    step_s, step_cpu_s = timings["a step"].median_s, median(timings["a step"].cpu_s)
    rows = []
    for way, each in timings.items():
        wall_s, cpu_s = each.median_s, median(each.cpu_s)
        rate = "" if "step" in way else f"{WORLD_SIZE * nbytes / cpu_s / 1e9:.1f}"
        shares = f"{wall_s / step_s:.0%}", f"{cpu_s / step_cpu_s:.0%}"
        rows.append([way, f"{wall_s * 1e3:.1f}", shares[0], f"{cpu_s * 1e3:.1f}", shares[1], rate])
    print(f"{WORLD_SIZE} ranks of dp {VARIANT}, {nbytes / 1e6:.1f} MB of gradients and weights a rank; medians:")
    print(table(["", "ms", "of a step", "CPU ms of all ranks", "of a step", "GB/s of a core"], rows))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
