"""What 16 bits predict before they run: bytes sent and held; and the settings that they cannot take."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from distlab.collectives.costs import all_reduce_bytes, gloo_all_reduce_messages
from distlab.config import Config
from distlab.contract import Measured, untrainable
from distlab.data_parallel.buckets import layout
from distlab.lab import Lab
from distlab.measure.prediction import Prediction
from distlab.precision.mixed_precision import LossScale
from distlab.sharded.costs import Happening, Replicated, adamw_scratch_bytes, pass_peak, rest_bytes, shown_on
from distlab.verify.counted import outlined
from distlab.workload.data import Microbatch
from distlab.workload.model import outline

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


# The formats, from their own definitions, what each makes of a gradient of 1e-8, and samples in one of them.

FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = 1e-8


def show_formats(lab: Lab) -> None:
    """Both tables."""
    columns = [
        "format",
        "exponent bits",
        "fraction bits",
        "largest",
        "smallest normal",
        "smallest of all",
        "1 and its next",
    ]
    lab.table("The formats", columns, [[name, *described(dtype)] for name, dtype in FORMATS.items()])
    lab.table(
        f"A gradient of {SMALL:g}",
        ["kept in", "is read as"],
        [[name, f"{value:.3g}"] for name, value in small_number_in_formats().items()],
    )


def described(dtype: torch.dtype) -> list[Any]:
    """Bits, range and precision, from torch.finfo."""
    limits = torch.finfo(dtype)
    fraction = -round(math.log2(limits.eps))
    powers = [f"2^{round(math.log2(value))}" for value in (limits.smallest_normal, limits.smallest_normal * limits.eps)]
    return [limits.bits - 1 - fraction, fraction, f"{limits.max:.6g}", *powers, f"1 + 2^-{fraction}"]


def small_number_in_formats() -> dict[str, float]:
    """1e-8, written to each format and read again; scaled, it is divided by the scale in float32."""
    gradient, scale = torch.tensor(SMALL), LossScale().value
    values = {name: gradient.to(dtype).item() for name, dtype in FORMATS.items()}
    return values | {f"fp16, scaled by {scale:g}": ((gradient * scale).to(torch.float16).float() / scale).item()}


def converted(microbatch: Microbatch, dtype: torch.dtype) -> Microbatch:
    """With inputs in `dtype`, where they are no tokens."""
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
    """What a variant computes in."""
    return torch.float32 if name == "fp32" else torch.float16 if name.startswith("fp16") else torch.bfloat16


def peak_bytes(name: str, config: Config, passes: list[Happening]) -> float:
    """Weights, masters, moments and gradients of variant `name`, and the highest of the passes or of the update."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    adam, total, itemsize = config.optimizer == "adamw", sum(sizes), format_of(name).itemsize
    in_float32 = name.endswith("_master") or name in COPIED
    held = rest_bytes(
        0, total, total, itemsize=itemsize, moments=2 * adam, masters=in_float32, num_tensors=adam * len(sizes)
    )
    copies = 4 * total if name in COPIED else 0  # which an update makes, and which are counted as masters above
    constant = held["parameters"] + held["optimizer"] - copies
    in_passes = pass_peak(passes, Replicated(constant, held["gradients"], itemsize, in_buckets=True))
    update = constant + held["gradients"] + copies + (4 * total if in_float32 else 0)
    stepped = update + adam * adamw_scratch_bytes(sizes, 4 if in_float32 else itemsize)
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
            shown=shown_on(lab.config.device),
            control="tests/experiments/test_precision.py::test_copies_that_are_not_let_go_show_in_the_peak",
        )  # fmt: skip
