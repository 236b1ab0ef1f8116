"""What 16 bits predict before they run: bytes sent and held; and the settings that they cannot take."""

from dataclasses import replace

import torch

from distlab.contract import untrainable
from distlab.lab.config import Config
from distlab.lab.measure.prediction import PYTORCHS, Prediction
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import outline
from distlab.techniques.collectives.costs import all_reduce_bytes, gloo_all_reduce_messages
from distlab.techniques.data_parallel.buckets import layout
from distlab.techniques.sharded.costs import rest_bytes

NAMES = ("bf16", "fp16", "fp32", "fp16_scaled", "bf16_master", "autocast")
SCALED = ("fp16_scaled",)
STEPPED_IN_FLOAT32 = (*SCALED, "bf16_master")


def refuse(config: Config) -> list[str]:
    if config.dtype == "float32":
        return untrainable(config)
    chosen = f"LAB_DTYPE={config.dtype!r} is what the variants of precision choose, allowed: float32"
    return [*untrainable(config), chosen]


def predict(config: Config) -> list[Prediction]:
    """Bytes of one step of each variant, and what stands in memory between two steps, a value a rank."""
    ranks, numels = config.world_size, [parameter.numel() for parameter in outline(config).parameters()]
    predictions = []
    for name in NAMES:
        itemsize = format_of(name).itemsize
        sizes = [numel * itemsize for numel in numels]
        buckets = [sum(sizes[index] for index in bucket) for bucket in layout(sizes, config.bucket_mib * 2**20)]
        value = (all_reduce_bytes("gloo", ranks, sum(sizes)),) * ranks
        messages = (sum(gloo_all_reduce_messages(ranks, size) for size in buckets),) * ranks
        formula = f"2(N-1)/N x {itemsize}P"
        calls = Prediction(name, "wire bytes", "B", formula, value, len(buckets), messages=messages)
        predictions.append(replace(calls, shown=PYTORCHS) if name == "autocast" else calls)
    return predictions + [at_rest(config, name, numels) for name in NAMES]


def at_rest(config: Config, name: str, numels: list[int]) -> Prediction:
    """What stands in memory: of float32 copies that are not kept nothing but their moments, in float32 too."""
    total, adam, stepped = sum(numels), config.optimizer == "adamw", name in STEPPED_IN_FLOAT32
    classes = rest_bytes(
        0, total, total, masters=stepped, itemsize=format_of(name).itemsize, moments=2 * adam,
        num_tensors=adam * len(numels),
    )  # fmt: skip
    held = sum(classes.values()) - (4 * total if name in SCALED else 0)
    formula = f"{round((held - 4 * adam * len(numels)) / total)} x P"
    found = Prediction(name, "rest bytes", "B", formula, (float(held),) * config.world_size, 0)
    return replace(found, shown=PYTORCHS) if name == "autocast" else found


def format_of(name: str) -> torch.dtype:
    """The type of its weights; autocast keeps those in float32."""
    if name in ("fp32", "autocast"):
        return torch.float32
    return torch.float16 if name.startswith("fp16") else torch.bfloat16


def converted(microbatch: Microbatch, dtype: torch.dtype) -> Microbatch:
    inputs = microbatch.inputs
    return microbatch._replace(inputs=inputs.to(dtype)) if inputs.is_floating_point() else microbatch
