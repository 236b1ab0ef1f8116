"""What data parallelism claims beside the proof: every sample once a step, and replicas that stay equal to the bit."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contract import Strategy
from workers.lab import Lab
from workers.measure.difference import apart

CONTROLS = "tests/workers/passes/test_controls.py::{}"


def check_samples(lab: Lab) -> None:
    """Each sample of the global batch is worked on exactly once a step."""
    batches = lab.batches(torch.float64, proof=True)
    steps = min(3, batches.proof_steps)
    mine = [batches.sample_ids(step, lab.rank, lab.world_size) for step in range(steps)]
    everyone = lab.exchange.gather("samples", mine)
    if everyone is None:
        return
    off = 0
    for step in range(steps):
        times = Counter(sample for of_rank in everyone for sample in of_rank[step])
        wanted = Counter(batches.full_ids(step))
        off = max(off, *(abs(times[sample] - wanted[sample]) for sample in times | wanted))
    sizes = ", ".join(str(len(of_rank[0])) for of_rank in everyone)
    lab.check(
        "samples",
        off,
        0,
        detail=f"shards of {sizes} samples; the difference is the worst sample's count",
        control=CONTROLS.format("test_a_sample_dealt_twice_is_seen"),
    )


def check_replicas(lab: Lab, name: str, strategy: Strategy) -> None:
    """All ranks hold the same weights, to the bit."""
    check_same(lab, name, [weight for _, weight in strategy.full("weights")])


def check_same(lab: Lab, name: str, weights: Sequence[Tensor]) -> None:
    """All ranks hold the same in these, to the bit."""
    mine = torch.cat([weight.flatten() for weight in weights])
    first = mine.clone()
    dist.broadcast(first, group=lab.group, group_src=0)
    differs = 0.0 if torch.equal(mine, first) else apart(mine, first)
    lab.check("replicas", differs, 0.0, variant=name, control=CONTROLS.format("test_a_replica_of_its_own_is_seen"))
