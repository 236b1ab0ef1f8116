"""The formats, from their own definitions, what each makes of a gradient of 1e-8, and samples in one of them."""

import math
from typing import Any

import torch

from workers.lab import Lab
from workers.parallel.scaling import LossScale
from workers.workload.data import Microbatch

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
        [[name, f"{value:.3g}"] for name, value in kept().items()],
    )


def described(dtype: torch.dtype) -> list[Any]:
    """Bits, range and precision, from torch.finfo."""
    limits = torch.finfo(dtype)
    fraction = -round(math.log2(limits.eps))
    powers = [f"2^{round(math.log2(value))}" for value in (limits.smallest_normal, limits.smallest_normal * limits.eps)]
    return [limits.bits - 1 - fraction, fraction, f"{limits.max:.6g}", *powers, f"1 + 2^-{fraction}"]


def kept() -> dict[str, float]:
    """1e-8, written to each format and read again; scaled, it is divided by the scale in float32."""
    gradient, scale = torch.tensor(SMALL), LossScale().value
    values = {name: gradient.to(dtype).item() for name, dtype in FORMATS.items()}
    return values | {f"fp16, scaled by {scale:g}": ((gradient * scale).to(torch.float16).float() / scale).item()}


def converted(microbatch: Microbatch, dtype: torch.dtype) -> Microbatch:
    """With inputs in `dtype`, where they are no tokens."""
    inputs = microbatch.inputs
    return microbatch._replace(inputs=inputs.to(dtype)) if inputs.is_floating_point() else microbatch
