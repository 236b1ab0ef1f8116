"""What 16 bits predict before they run: bytes sent and held; and the settings that they cannot take."""

import torch

from workers.config import Config
from workers.contract import untrainable
from workers.measure.formulas import Prediction
from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.messages import gloo_all_reduce_messages
from workers.measure.formulas.sharding import rest_bytes
from workers.parallel.buckets import layout
from workers.workload.model import outline

NAMES = ("bf16", "fp16", "fp32", "fp16_scaled", "bf16_master", "fp16_master", "bf16_stochastic")
SCALED = ("fp16_scaled", "fp16_master")
COPIED = ("fp16_scaled", "bf16_stochastic")  # stepped in float32, which is not kept


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    if config.dtype == "float32":
        return untrainable(config)
    chosen = f"LAB_DTYPE={config.dtype!r} is what the variants of precision choose, allowed: float32"
    return [*untrainable(config), chosen]


def predict(config: Config) -> list[Prediction]:
    """Bytes of one step of each variant, and what stands in memory between two steps, a value a rank."""
    numels = [parameter.numel() for parameter in outline(config).parameters()]
    predictions = []
    for name in NAMES:
        itemsize = 4 if name == "fp32" else 2
        sizes = [numel * itemsize for numel in numels]
        buckets = [sum(sizes[index] for index in bucket) for bucket in layout(sizes, config.bucket_mib * 2**20)]
        messages = sum(gloo_all_reduce_messages(config.world_size, size) for size in buckets)
        total = all_reduce_bytes("gloo", config.world_size, sum(numels) * itemsize)
        value = (total,) * config.world_size
        predictions.append(
            Prediction(
                name, "wire bytes", "B", f"2(N-1)/N x {itemsize}P", value, len(buckets),
                messages=(messages,) * config.world_size,
            )
        )  # fmt: skip
    return predictions + [at_rest(config, name, numels) for name in NAMES]


def at_rest(config: Config, name: str, numels: list[int]) -> Prediction:
    """Weights, gradients, masters and moments; who steps float32 copies has its moments in float32, too."""
    total, adam = sum(numels), config.optimizer == "adamw"
    masters = name.endswith("_master") or name in COPIED
    itemsize = 4 if name == "fp32" else torch.bfloat16.itemsize
    like = {"itemsize": itemsize, "moments": 2 * adam, "num_tensors": adam * len(numels)}
    held = sum(rest_bytes(0, total, total, masters=masters, **like).values())
    if name in COPIED:
        held -= 4 * total  # the copies themselves are gone by then
    formula = f"{round((held - 4 * adam * len(numels)) / total)} x P"
    return Prediction(name, "rest bytes", "B", formula, (float(held),) * config.world_size, 0)
