"""What 16 bits claim before they run: bytes sent and held, and the settings that they cannot take."""

import torch

from workers.config import Config
from workers.lab import Bug, no_checkpoints
from workers.measure.formulas import Prediction
from workers.measure.formulas.collectives import all_reduce_bytes
from workers.measure.formulas.sharding import rest_bytes
from workers.parallel.buckets import layout
from workers.workload import data, model, text
from workers.workload.model import outline

VARIANTS = ("fp32", "bf16", "fp16", "fp16_scaled", "bf16_master", "fp16_master", "bf16_stochastic")
SCALED = ("fp16_scaled", "fp16_master")
COPIED = ("fp16_scaled", "bf16_stochastic")  # stepped in float32, which is not kept

BUGS = {
    "unscaled_clip": Bug(
        "gradients are clipped while they still carry the scale of the loss: their norm is 65536 times too large, so that what "
        "is left after unscaling is far too small",
        "clipped gradients",
    )
}


def title(config: Config) -> str:
    """What is trained, for headings."""
    return outline(config).describe()


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    faults = model.faults(config) + data.faults(config, config.world_size) + text.faults(config) + invisible(config)
    if config.dtype != "float32":
        faults.append(f"LAB_DTYPE={config.dtype!r} is what the variants of precision choose, allowed: float32")
    return faults + no_checkpoints(config, "saves neither the scale of the loss nor the state of its random rounding")


def invisible(config: Config) -> list[str]:
    """A sentence if no check could see LAB_BUG with these settings."""
    if config.bug != "unscaled_clip":
        return []
    reasons = [
        (not config.proof, "LAB_PROOF=0: nothing is compared"),
        (config.clip is None, "LAB_CLIP unset: nothing is clipped"),
        (
            bool(config.variant) and not set(config.variant) & set(SCALED),
            f"these variants: it takes {' or '.join(SCALED)}",
        ),
    ]
    return [f"LAB_BUG=unscaled_clip cannot show with {reason}" for applies, reason in reasons if applies][:1]


def predict(config: Config) -> list[Prediction]:
    """Bytes of one step of each variant, and what stands in memory between two steps, a value a rank."""
    numels = [parameter.numel() for parameter in outline(config).parameters()]
    predictions = []
    for name in VARIANTS:
        itemsize = 4 if name == "fp32" else 2
        calls = len(layout([numel * itemsize for numel in numels], config.bucket_mib * 2**20))
        total = all_reduce_bytes("gloo", config.world_size, sum(numels) * itemsize)
        value = (total,) * config.world_size
        predictions.append(Prediction(name, "wire bytes", "B", f"2(N-1)/N x {itemsize}P", value, calls))
    return predictions + [at_rest(config, name, numels) for name in VARIANTS]


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
