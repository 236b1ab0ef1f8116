"""The most that a step of 16 bits holds, predicted: one process's passes in the format, or the update in float32.

An update through float32 has its own top: every gradient once more in 4 bytes, and the weights too where no masters
are kept; then the weights are rounded back one after another, and what each needed is let go.
"""

from collections.abc import Mapping
from functools import partial

import torch

from experiments.precision.formats import converted
from experiments.precision.predictions import COPIED
from workers.config import Config
from workers.contract import Measured
from workers.lab import Lab
from workers.measure.formulas.peaks import Happening, Replicated, adamw_scratch_bytes, pass_peak, shown_on
from workers.measure.formulas.sharding import rest_bytes
from workers.passes.outline import outlined
from workers.workload.data import Microbatch
from workers.workload.model import outline

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
