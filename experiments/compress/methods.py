"""Which compressor a variant sends its buckets through, and the mistakes that LAB_BUG makes in it."""

import torch
import torch.distributed as dist

from experiments.compress import faults
from workers.config import Config
from workers.lab import Strategy
from workers.parallel.buckets import GradientBuckets
from workers.parallel.casting import Cast
from workers.parallel.compression import Compressor
from workers.parallel.lowrank import LowRank
from workers.parallel.quantised import Quantised
from workers.parallel.sign import Sign
from workers.parallel.sparse import RandomK, TopK
from workers.strategies.replica import Replica, begin_alike
from workers.workload.model import Model

METHODS = ("bf16", "fp16", "int8", "topk", "randomk", "sign", "powersgd")
# What these leave out is no noise around the gradient: without feedback they are biased.
PLAIN = ("topk", "sign", "powersgd")


def compressed(model: Model, group: dist.ProcessGroup, config: Config, method: str, *, feedback: bool) -> Strategy:
    """A replica whose buckets are summed through `method`."""
    begin_alike(model, group, config)

    def all_reduce_of(shapes: list[torch.Size]) -> "Compressor | faults.Forgetful":
        compressor = compressor_of(method, group, config, shapes, feedback=feedback)
        return faults.Forgetful(compressor) if config.bug == "no_error_feedback" and feedback else compressor

    buckets = GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20, all_reduce_of=all_reduce_of)
    return Replica(model, config, buckets)


def compressor_of(
    method: str, group: dist.ProcessGroup, config: Config, shapes: list[torch.Size], *, feedback: bool
) -> Compressor:
    """The compressor of one bucket, whose gradients have `shapes`."""
    if method in ("bf16", "fp16"):
        return Cast(group, torch.bfloat16 if method == "bf16" else torch.float16, feedback=feedback)
    if method == "int8":
        quantised = faults.Overflowing if config.bug == "int8_overflow" else Quantised
        return quantised(group, rank_seed(config, group.rank()), feedback=feedback)
    if method == "topk":
        return TopK(group, config.ratio, feedback=feedback)
    if method == "randomk":
        seed = rank_seed(config, group.rank()) if config.bug == "unshared_seed" else config.seed
        return RandomK(group, config.ratio, seed, feedback=feedback)
    if method == "sign":
        return Sign(group, feedback=feedback)
    low_rank = faults.PerRank if config.bug == "per_rank_powersgd" else LowRank
    return low_rank(group, shapes, config.low_rank, config.seed, feedback=feedback)


def rank_seed(config: Config, rank: int) -> int:
    """A seed of this rank's own."""
    return 1_000_003 * config.seed + rank
