"""What compression predicts before it runs: bytes, calls and memory of each variant; and sizes that it cannot take."""

import math

import torch
from torch import Size

from experiments.compress.options import Options
from workers.config import Config
from workers.contract import untrainable
from workers.measure.formulas import PYTORCHS, Prediction
from workers.measure.formulas.compression import FORMULAS, bucket_bytes, bucket_calls
from workers.measure.formulas.messages import gloo_all_reduce_messages
from workers.measure.formulas.sharding import rest_bytes
from workers.parallel.buckets import layout
from workers.parallel.lowrank import pays
from workers.workload.model import outline

METHODS = ("bf16", "fp16", "int8", "topk", "randomk", "sign", "powersgd")
# What these leave out is no noise around the gradient: without feedback they are biased.
PLAIN = ("topk", "sign", "powersgd")
TORCHS = {"ddp": "dense", "ddp_fp16": "fp16", "ddp_powersgd": "powersgd"}
OURS = {
    "naive": "topk",
    "dense": "dense",
    **{name: name for name in METHODS},
    **{f"{name}_plain": name for name in PLAIN},
}
METHOD_OF = OURS | TORCHS  # of each variant


def own(config: Config) -> Options:
    """The settings that this mode alone knows."""
    return config.own(Options)


def refuse(config: Config) -> list[str]:
    """What this mode cannot run: a rank that was asked for and that no matrix can be factored by, before all else."""
    wants_low_rank = not config.variant or any(METHOD_OF.get(name) == "powersgd" for name in config.variant)
    reason = no_factors(config) if "low_rank" in config.options.model_fields_set and wants_low_rank else ""
    return ([reason] if reason else []) + untrainable(config)


def cannot(config: Config) -> dict[str, str]:
    """The variants that these settings leave no sense, and a reason for each."""
    reasons: dict[str, str] = {}
    if config.dtype == "bfloat16":
        reason = "LAB_DTYPE=bfloat16: gradients are of 16 bits already"
        reasons |= dict.fromkeys(("bf16", "fp16", "ddp_fp16"), reason)
    if not own(config).error_feedback:
        reasons |= {f"{name}_plain": f"LAB_ERROR_FEEDBACK=0: {name} is without it already" for name in PLAIN}
    if reason := no_factors(config):
        reasons |= {name: reason for name, method in METHOD_OF.items() if method == "powersgd"}
    return reasons


def no_factors(config: Config) -> str:
    """Why PowerSGD cannot factor with these settings; empty if it can."""
    low_rank, side = own(config).low_rank, smallest_side(config)
    if low_rank > side:
        what = f"LAB_LOW_RANK={low_rank} is above the smallest side of a weight matrix of this model"
        return f"{what}, allowed: 1 to {side}"
    if not any(pays(parameter.shape, low_rank) for parameter in outline(config).parameters()):
        return f"LAB_LOW_RANK={low_rank} factors nothing: two factors are as large as any weight matrix of this model"
    return ""


def smallest_side(config: Config) -> int:
    """Of all weight matrices."""
    return min(min(p.shape[0], p.shape[1:].numel()) for p in outline(config).parameters() if p.dim() > 1)


def bucket_members(config: Config, itemsize: int, variant: str = "") -> list[list[int]]:
    """Which parameters lie in each bucket, by their number, in its order; `naive` has a bucket a gradient."""
    sizes = [parameter.numel() * itemsize for parameter in outline(config).parameters()]
    bucket_mib = 0 if variant == "naive" else config.bucket_mib
    return layout(sizes, bucket_mib * 2**20)


def bucket_shapes(config: Config, itemsize: int, variant: str = "") -> list[list[Size]]:
    """The shapes of the gradients in each bucket, in the order of the bucket."""
    shapes = [parameter.shape for parameter in outline(config).parameters()]
    return [[shapes[index] for index in bucket] for bucket in bucket_members(config, itemsize, variant)]


def sent_bytes(config: Config, variant: str, world_size: int) -> float:
    """Bytes that a rank sends in a step, by the formula."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    ratio, low_rank = own(config).ratio, own(config).low_rank
    return math.fsum(
        bucket_bytes(METHOD_OF[variant], world_size, shapes, itemsize, ratio=ratio, low_rank=low_rank)
        for shapes in bucket_shapes(config, itemsize, variant)
    )


def calls(config: Config, variant: str) -> int:
    """Collectives in a step; `naive` sends numbers and places apart."""
    buckets = bucket_shapes(config, getattr(torch, config.dtype).itemsize, variant)
    one_by_one = sum(bucket_calls(METHOD_OF[variant], shapes, own(config).low_rank) for shapes in buckets)
    return 2 * one_by_one if variant == "naive" else one_by_one


def messages(config: Config, variant: str, world_size: int) -> int:
    """Messages of a rank in a step: 2(N-1) an all_gather; of all_reduces the longest may be more than 4(N-1)."""
    if METHOD_OF[variant] in ("topk", "sign"):
        return 2 * (world_size - 1) * calls(config, variant)
    short = gloo_all_reduce_messages(world_size, 1)
    itemsize: int = getattr(torch, config.dtype).itemsize
    sent = [sum(shape.numel() for shape in shapes) * itemsize for shapes in bucket_shapes(config, itemsize, variant)]
    longest = sum(gloo_all_reduce_messages(world_size, nbytes) for nbytes in sent)
    return longest + short * (calls(config, variant) - len(sent))


def predict(config: Config) -> list[Prediction]:
    """Bytes and calls of one step of each variant, and what stands in memory between two steps, a value a rank."""
    ranks, impossible = config.world_size, cannot(config)
    names = [name for name in METHOD_OF if name not in impossible]
    return [
        Prediction(
            name, "wire bytes", "B", FORMULAS[METHOD_OF[name]], (sent_bytes(config, name, ranks),) * ranks,
            calls(config, name), shown=PYTORCHS if name in TORCHS else "",
            messages=(messages(config, name, ranks),) * ranks,
        )
        for name in names
    ] + [at_rest(config, name) for name in names]  # fmt: skip


def at_rest(config: Config, name: str) -> Prediction:
    """Weights, gradients and optimizer state as in dp, and the residual: a gradient more."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    itemsize: int = getattr(torch, config.dtype).itemsize
    adam = config.optimizer == "adamw"
    held = rest_bytes(0, sum(sizes), sum(sizes), itemsize=itemsize, moments=2 * adam, num_tensors=adam * len(sizes))
    residual = own(config).error_feedback and name in METHODS
    value = sum(held.values()) + residual * itemsize * sum(sizes)
    formula = f"{(2 + 2 * adam + residual) * itemsize} x P"
    return Prediction(
        name,
        "rest bytes",
        "B",
        formula,
        (float(value),) * config.world_size,
        0,
        shown=PYTORCHS if name in TORCHS else "",
    )
