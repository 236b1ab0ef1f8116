"""Predictions of 16-bit training: bytes sent and stored; and unsupported settings."""

import torch

from distlab.contract import untrainable
from distlab.lab.config import Config
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import outline
from distlab.techniques.data_parallel.costs import gradients_cost
from distlab.techniques.sharded import costs as sharded_costs
from distlab.techniques.sharded.costs import rest_bytes

NAMES = ("bf16", "fp16", "fp32", "fp16_scaled", "bf16_master", "autocast", "plain")
SCALED = ("fp16_scaled", "plain")
STEPPED_IN_FLOAT32 = (*SCALED, "bf16_master")


def refuse(config: Config) -> list[str]:
    if config.dtype == "float32":
        return untrainable(config)
    refusal = f"LAB_DTYPE={config.dtype!r} is set by the variants of precision themselves, allowed: float32"
    return [*untrainable(config), refusal]


def predict(config: Config) -> list[Prediction]:
    """Return the bytes of a step and the bytes stored between steps, per variant and rank."""
    found: list[Prediction] = []
    for name in NAMES:
        itemsize, shown = format_of(name).itemsize, PYTORCHS * (name == "autocast")
        costs = [gradients_cost(config, itemsize)] * config.world_size
        found += of_a_step(name, f"2(N-1)/N x {itemsize}P", costs, shown)
    return found + [at_rest(config, name) for name in NAMES]


def at_rest(config: Config, name: str) -> Prediction:
    """Return the stored bytes: of temporary float32 copies only their float32 moments remain."""
    total, tensors = outline(config).num_parameters(), (config.optimizer == "adamw") * len(outline(config).sizes)
    classes = rest_bytes(
        0, total, total, masters=name in STEPPED_IN_FLOAT32, itemsize=format_of(name).itemsize,
        moments=2 * (tensors > 0), num_tensors=tensors,
    )  # fmt: skip
    nbytes = sum(classes.values()) - (4 * total if name == "fp16_scaled" else 0)
    formula = f"{round((nbytes - 4 * tensors) / total)} x P"
    return sharded_costs.at_rest(name, config, formula, [nbytes], PYTORCHS * (name == "autocast"), format_of(name))


def format_of(name: str) -> torch.dtype:
    """Return the dtype of its weights; autocast has float32."""
    if name in ("fp32", "autocast"):
        return torch.float32
    return torch.float16 if name.startswith("fp16") or name == "plain" else torch.bfloat16


def converted(microbatch: Microbatch, dtype: torch.dtype) -> Microbatch:
    inputs = microbatch.inputs
    return microbatch._replace(inputs=inputs.to(dtype)) if inputs.is_floating_point() else microbatch
