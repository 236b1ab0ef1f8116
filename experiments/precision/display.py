"""What the run says of its losses: a table, the scale over the steps, and gradients beside where the formats end."""

import math
from statistics import fmean

import torch
from torch import Tensor

from distlab.lab import Lab
from distlab.precision.mixed_precision import LossScale

from .checks import TrainingTrace, exact_replica, gradient_of

LEAST_EXPONENT = -50  # what is shown of a histogram that goes on


def show_seen(lab: Lab, seen: dict[str, TrainingTrace]) -> None:
    """The table, the losses and the scale over the steps."""
    if lab.rank != 0:
        return
    columns = ["variant", "underflow, first step", "last step", "inf or NaN", "skipped", "scale", "updates that vanish"]
    rows = [
        [
            name, *(percent(share) for share in (each.underflowed[0], each.underflowed[-1])),
            f"{sum(each.overflowed)} in {sum(map(bool, each.overflowed))} steps", each.skipped, f"{each.scales[-1]:g}",
            percent(fmean(each.vanished)) if each.vanished else "-", each.losses[0], each.losses[-1],
        ]
        for name, each in seen.items()
    ]  # fmt: skip
    lab.table(
        f"What {lab.config.steps} steps lost: share of gradients that are zero and should not be, of updates that are",
        [*columns, "first loss", "last loss"],
        rows,
    )
    steps = [float(step) for step in range(lab.config.steps)]
    lab.chart("Loss by format", "step", "loss", {name: finite(steps, each.losses) for name, each in seen.items()})
    scales = {name: [steps, each.scales] for name, each in seen.items() if each.scales[0] > 1}
    if scales:
        lab.chart(
            "Scale of the loss: halved by an overflow, doubled after 2000 steps without one",
            "step",
            "scale",
            scales,
            log_y=True,
        )


def show_gradients(lab: Lab) -> None:
    """How large the gradients of the first step are, beside where the formats end."""
    exact = exact_replica(lab)
    exact.backward(lab.dealt(lab.batches(torch.float32), 0))
    gradient = gradient_of(exact)
    shares = by_exponent(gradient)
    scaled = {exponent + math.log2(LossScale().value): share for exponent, share in shares.items()}
    highest = max(shares.values(), default=0.0)
    series = {
        name: [list(each), list(each.values())]
        for name, each in {"gradients": shares, "scaled by 65536": scaled}.items()
    }
    limits = torch.finfo(torch.float16)
    ends = {
        "fp16 ends": limits.smallest_normal * limits.eps,
        "fp16 loses digits below": limits.smallest_normal,
        "fp16 largest": limits.max,
    }
    series |= {name: [[math.log2(value)] * 2, [0.0, highest]] for name, value in ends.items()}
    bf16 = torch.finfo(torch.bfloat16).smallest_normal
    lab.chart(
        f"Gradients of the first step by power of two (bf16 goes on to 2^{math.log2(bf16):g})",
        "exponent",
        "per cent",
        series,
    )
    nonzero = gradient[gradient != 0].abs()
    below = {
        name: percent((nonzero < value).double().mean().item())
        for name, value in ends.items()
        if name != "fp16 largest"
    }
    lab.say(
        ", ".join(f"{share} below where {name}" for name, share in below.items()) + " (of nonzero gradients, float32)",
        "gradients",
    )


def by_exponent(gradient: Tensor) -> dict[float, float]:
    """Per cent of the nonzero elements whose size is in [2^e, 2^(e+1)), by e, from the least that is shown."""
    nonzero = gradient[gradient != 0].abs()
    exponents = nonzero.log2().floor().clamp(min=LEAST_EXPONENT)
    values, counts = exponents.unique(return_counts=True)
    return {float(value): 100.0 * int(count) / len(nonzero) for value, count in zip(values, counts, strict=True)}


def percent(share: float) -> str:
    """A share for a table; none is known of gradients that are no numbers."""
    return f"{100 * share:.3g} %" if math.isfinite(share) else "-"


def finite(steps: list[float], losses: list[float]) -> list[list[float]]:
    """A curve up to where its loss is no number any more."""
    known = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)]
    return [[step for step, _ in known], [loss for _, loss in known]]
