"""What 16 bits predict before they run: bytes sent and held; and the settings that they cannot take."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from distlab.collectives.costs import all_reduce_bytes, gloo_all_reduce_messages
from distlab.config import Config
from distlab.contract import Measured, untrainable
from distlab.data_parallel.buckets import layout
from distlab.lab import Lab
from distlab.measure.prediction import PYTORCHS, Prediction
from distlab.sharded.costs import Happening, Replicated, adamw_scratch_bytes, pass_peak, rest_bytes, shown_on
from distlab.verify.counted import outlined
from distlab.workload.data import Microbatch
from distlab.workload.model import outline

NAMES = ("bf16", "fp16", "fp32", "fp16_scaled", "bf16_master", "fp16_master", "bf16_stochastic", "autocast")
SCALED = ("fp16_scaled", "fp16_master")
COPIED = ("fp16_scaled", "bf16_stochastic")  # stepped in float32, which is not kept


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


def held_bytes(config: Config, name: str, numels: list[int]) -> dict[str, float]:
    """Weights, gradients, masters and moments by class; who steps float32 copies has its moments in float32, too."""
    total, adam = sum(numels), config.optimizer == "adamw"
    return rest_bytes(
        0, total, total, masters=in_float32(name), itemsize=format_of(name).itemsize, moments=2 * adam,
        num_tensors=adam * len(numels),
    )  # fmt: skip


def at_rest(config: Config, name: str, numels: list[int]) -> Prediction:
    """What stands in memory: of float32 copies that are not kept nothing."""
    total, adam = sum(numels), config.optimizer == "adamw"
    held = sum(held_bytes(config, name, numels).values()) - (4 * total if name in COPIED else 0)
    formula = f"{round((held - 4 * adam * len(numels)) / total)} x P"
    found = Prediction(name, "rest bytes", "B", formula, (float(held),) * config.world_size, 0)
    return replace(found, shown=PYTORCHS) if name == "autocast" else found


def converted(microbatch: Microbatch, dtype: torch.dtype) -> Microbatch:
    inputs = microbatch.inputs
    return microbatch._replace(inputs=inputs.to(dtype)) if inputs.is_floating_point() else microbatch


# The most that a step of 16 bits holds, predicted: one process's passes in the format, or the update in float32.
#
# An update through float32 has its own top: every gradient once more in 4 bytes, and the weights too where no masters
# are kept; then the weights are rounded back one after another, and what each needed is let go.

# Bytes a number while one weight is rounded at random: the noise and the bits of it, each an int32; whether it is
# finite, and for that its magnitude, two flags and what was compared with.
ROUNDED_AT_RANDOM = 4 + 4 + 1 + 4 + 1


def format_of(name: str) -> torch.dtype:
    """The type of its weights; autocast keeps those in float32."""
    if name in ("fp32", "autocast"):
        return torch.float32
    return torch.float16 if name.startswith("fp16") else torch.bfloat16


def in_float32(name: str) -> bool:
    """Whether a variant that computes in 16 bits is stepped in float32."""
    return name.endswith("_master") or name in COPIED


def peak_bytes(name: str, config: Config, passes: list[Happening]) -> float:
    """Weights, masters, moments and gradients of variant `name`, and the highest of the passes or of the update."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    adam, total, itemsize = config.optimizer == "adamw", sum(sizes), format_of(name).itemsize
    held = held_bytes(config, name, sizes)
    copies = 4 * total if name in COPIED else 0  # which an update makes, and which are counted as masters above
    constant = held["parameters"] + held["optimizer"] - copies
    in_passes = pass_peak(passes, Replicated(constant, held["gradients"], itemsize, in_buckets=True))
    update = constant + held["gradients"] + copies + (4 * total if in_float32(name) else 0)
    stepped = update + adam * adamw_scratch_bytes(sizes, 4 if in_float32(name) else itemsize)
    back = max(rounded_back(name, sizes), default=0.0)
    return max(in_passes, stepped, update + back)


def rounded_back(name: str, sizes: list[int]) -> list[float]:
    """What each weight that is rounded at random adds to an update; those before it let go of copy and gradient."""
    if name != "bf16_stochastic":
        return []
    return [float(ROUNDED_AT_RANDOM * size - 8 * sum(sizes[:index])) for index, size in enumerate(sizes)]


def dealt_in(dtype: torch.dtype, batches: list[list[Microbatch]], parts: list[Microbatch]) -> list[Microbatch]:
    """The microbatches in the format; those in float32 are `batches`', which stay until the step is over."""
    batches.append(parts)
    return [converted(part, dtype) for part in parts]


def compare_peak(lab: Lab, measured: Mapping[str, Measured]) -> None:
    """Hold the most that each variant held against the formula, within 5 %."""
    passes = {
        dtype: outlined(lab, dtype=dtype, dealt=partial(dealt_in, dtype, [])) for dtype in map(format_of, measured)
    }
    for name in measured:
        predicted = peak_bytes(name, lab.config, passes[format_of(name)])
        lab.compare(
            "peak bytes", predicted, sum(measured[name].peak.values()), tolerance=0.05 * predicted, variant=name,
            formula="weights + masters + optimizer + gradients + one process's passes, or the update in float32",
            shown=PYTORCHS if name == "autocast" else shown_on(lab.config.device),
            control="tests/experiments/test_precision.py::test_copies_that_are_not_let_go_show_in_the_peak",
        )  # fmt: skip
