"""What compression claims before it runs: bytes and calls of each variant, memory, and the sizes that it cannot take."""

import math

import torch
from torch import Size

from experiments.compress.faults import invisible
from experiments.compress.methods import METHODS, PLAIN
from workers.config import Config
from workers.lab import no_checkpoints
from workers.measure.formulas import Prediction
from workers.measure.formulas.compression import FORMULAS, bucket_bytes, bucket_calls
from workers.measure.formulas.sharding import rest_bytes
from workers.parallel.buckets import layout
from workers.parallel.lowrank import pays
from workers.workload import data, model, text
from workers.workload.model import outline

TORCHS = {"ddp": "dense", "ddp_fp16": "fp16", "ddp_powersgd": "powersgd"}
OURS = {"dense": "dense", **{name: name for name in METHODS}, **{f"{name}_plain": name for name in PLAIN}}
METHOD_OF = TORCHS | OURS  # of each variant
NOT_SAVED = "keeps a residual of its own on each rank, as large as the gradients, without which a resumed run would lose what was not sent"


def title(config: Config) -> str:
    """What is trained, for headings."""
    return outline(config).describe()


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    named = {name: reason for name, reason in cannot(config).items() if name in config.variant}
    wrong = [f"LAB_VARIANT={name!r} is not possible with these settings: {reason}" for name, reason in named.items()]
    wants_low_rank = not config.variant or any(METHOD_OF.get(name) == "powersgd" for name in config.variant)
    if "low_rank" in config.model_fields_set and wants_low_rank and (reason := no_factors(config)):
        wrong = [reason]
    return (
        wrong
        + no_checkpoints(config, NOT_SAVED)
        + model.faults(config)
        + data.faults(config, config.world_size)
        + text.faults(config)
        + invisible(config, METHODS)
    )


def cannot(config: Config) -> dict[str, str]:
    """The variants that these settings leave no sense, and a reason for each."""
    reasons: dict[str, str] = {}
    if config.dtype == "bfloat16":
        reason = "LAB_DTYPE=bfloat16: gradients are of 16 bits already"
        reasons |= dict.fromkeys(("bf16", "fp16", "ddp_fp16"), reason)
    if not config.error_feedback:
        reasons |= {f"{name}_plain": f"LAB_ERROR_FEEDBACK=0: {name} is without it already" for name in PLAIN}
    if reason := no_factors(config):
        reasons |= {name: reason for name, method in METHOD_OF.items() if method == "powersgd"}
    return reasons


def no_factors(config: Config) -> str:
    """Why PowerSGD cannot factor with these settings; empty if it can."""
    if config.low_rank > smallest_side(config):
        return too_high(config)
    if not any(pays(parameter.shape, config.low_rank) for parameter in outline(config).parameters()):
        return f"LAB_LOW_RANK={config.low_rank} factors nothing: two factors are as large as any weight matrix of this model"
    return ""


def smallest_side(config: Config) -> int:
    """Of all weight matrices."""
    return min(min(p.shape[0], p.shape[1:].numel()) for p in outline(config).parameters() if p.dim() > 1)


def too_high(config: Config) -> str:
    side = smallest_side(config)
    return f"LAB_LOW_RANK={config.low_rank} is above the smallest side of a weight matrix of this model, allowed: 1 to {side}"


def bucket_shapes(config: Config, itemsize: int) -> list[list[Size]]:
    """The shapes of the gradients in each bucket, in the order of the bucket."""
    shapes = [parameter.shape for parameter in outline(config).parameters()]
    sizes = [shape.numel() * itemsize for shape in shapes]
    return [[shapes[index] for index in bucket] for bucket in layout(sizes, config.bucket_mib * 2**20)]


def sent_bytes(config: Config, method: str, world_size: int) -> float:
    """Bytes that a rank sends in a step, by the formula."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    return math.fsum(
        bucket_bytes(method, world_size, shapes, itemsize, ratio=config.ratio, low_rank=config.low_rank)
        for shapes in bucket_shapes(config, itemsize)
    )


def predict(config: Config) -> list[Prediction]:
    """Bytes and calls of one step of each variant, and what stands in memory between two steps, a value a rank."""
    ranks, itemsize = config.world_size, getattr(torch, config.dtype).itemsize
    buckets, impossible = bucket_shapes(config, itemsize), cannot(config)
    return [
        Prediction(
            name, "wire bytes", "B", FORMULAS[method], (sent_bytes(config, method, ranks),) * ranks,
            sum(bucket_calls(method, shapes, config.low_rank) for shapes in buckets), decides=name not in TORCHS,
        )
        for name, method in METHOD_OF.items() if name not in impossible
    ] + [at_rest(config, name) for name in METHOD_OF if name not in impossible]  # fmt: skip


def at_rest(config: Config, name: str) -> Prediction:
    """Weights, gradients and optimizer state as in dp, and the residual: a gradient more."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    itemsize: int = getattr(torch, config.dtype).itemsize
    adam = config.optimizer == "adamw"
    held = rest_bytes(0, sum(sizes), sum(sizes), itemsize=itemsize, moments=2 * adam, num_tensors=adam * len(sizes))
    residual = config.error_feedback and name in METHODS
    value = sum(held.values()) + residual * itemsize * sum(sizes)
    formula = f"{(2 + 2 * adam + residual) * itemsize} x P"
    return Prediction(
        name, "rest bytes", "B", formula, (float(value),) * config.world_size, 0, decides=name not in TORCHS
    )
