"""The formats of 16 bits, what they lost on the way, by a training that is looked at, and what is shown of it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from distlab.contract import Build
from distlab.data_parallel.buckets import GradientBuckets
from distlab.data_parallel.strategy import Replica
from distlab.lab import Lab
from distlab.precision import LossScale, Masters
from distlab.verify.proof import summed_losses
from distlab.workload.data import Microbatch

# The formats, from their own definitions, and what each makes of a gradient of 1e-8.

FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = 1e-8


def show_formats(lab: Lab) -> None:
    sizes = ["largest", "smallest normal", "smallest of all", "1 and its next"]
    columns = ["format", "exponent bits", "fraction bits", *sizes]
    lab.table("The formats", columns, [[name, *described(dtype)] for name, dtype in FORMATS.items()])
    rows = [[name, f"{value:.3g}"] for name, value in small_number_in_formats().items()]
    lab.table(f"A gradient of {SMALL:g}", ["kept in", "is read as"], rows)


def described(dtype: torch.dtype) -> list[Any]:
    limits = torch.finfo(dtype)
    fraction = -round(math.log2(limits.eps))
    powers = [f"2^{round(math.log2(value))}" for value in (limits.smallest_normal, limits.smallest_normal * limits.eps)]
    return [limits.bits - 1 - fraction, fraction, f"{limits.max:.6g}", *powers, f"1 + 2^-{fraction}"]


def small_number_in_formats() -> dict[str, float]:
    """1e-8, written to each format and read again; scaled, it is divided by the scale in float32."""
    gradient, scale = torch.tensor(SMALL), LossScale().value
    values = {name: gradient.to(dtype).item() for name, dtype in FORMATS.items()}
    return values | {f"fp16, scaled by {scale:g}": ((gradient * scale).to(torch.float16).float() / scale).item()}


# What 16 bits lost on the way: gradients that became zero, that left the range, and updates that left no trace.
#
# Each variant is trained anew and looked at around each update, which the timed steps do not pay for. What underflows
# is seen against the float32 gradient of the same samples at the same weights, element by element.


@dataclass
class TrainingTrace:
    """One variant's training: a value a step, of all P elements."""

    shares: list[float | None] = field(default_factory=list)  # of the loss, this rank's
    losses: list[float] = field(default_factory=list)  # of the batch, on rank 0
    scales: list[float] = field(default_factory=list)
    overflowed: list[int] = field(default_factory=list)  # elements of the gradient that are inf or NaN
    # Share that is zero, and is not in float32: first and last step.
    underflowed: list[float] = field(default_factory=list)
    # Share of nonzero gradients whose update left the weight as it was.
    vanished: list[float] = field(default_factory=list)
    skipped: int = 0


def observe(lab: Lab, name: str, build: Build) -> TrainingTrace:
    """Train LAB_STEPS steps, and look."""
    batches, seen = lab.batches(torch.float32), TrainingTrace()
    strategy = build(lab.model(torch.float32), lab.mesh, lab.config)
    assert isinstance(strategy, Replica)
    exact = exact_replica(lab)
    for step in range(lab.config.steps):
        lab.at(step, f"{name} observed")
        parts = lab.dealt(batches, step)
        seen.scales.append(strategy.scale)
        seen.shares.append(strategy.backward(parts).item())
        gradient = gradient_of(strategy)
        seen.overflowed.append(int((~gradient.isfinite()).sum()))
        if step in (0, lab.config.steps - 1):
            lost = (gradient == 0) & (gradient_at(strategy, exact, parts) != 0)
            seen.underflowed.append(math.nan if seen.overflowed[-1] else lost.double().mean().item())
        before = flat(remembered(strategy))
        strategy.update()
        if strategy.scale < seen.scales[-1]:
            seen.skipped += 1
        elif not seen.overflowed[-1]:
            moved = gradient != 0
            unmoved = (flat(remembered(strategy)) == before) & moved
            seen.vanished.append((unmoved.sum() / moved.sum().clamp(min=1)).item())
        lab.work.advance()
    seen.losses = summed_losses(lab, seen.shares)
    return seen


def exact_replica(lab: Lab) -> Replica:
    """A replica in float32, for its gradients alone."""
    model = lab.model(torch.float32)
    return Replica(model, lab.config, GradientBuckets(model.parameters(), lab.group, float("inf"), overlap=False))


@torch.no_grad()
def copy_weights(source: Replica, target: Replica) -> None:
    for theirs, ours in zip(source.model.parameters(), target.model.parameters(), strict=True):
        ours.copy_(theirs)


def gradient_at(strategy: Replica, exact: Replica, parts: list[Microbatch]) -> Tensor:
    """The float32 gradient over all ranks, at the weights that `strategy` computes with."""
    copy_weights(strategy, exact)
    exact.backward(parts)
    return gradient_of(exact)


def gradient_of(replica: Replica) -> Tensor:
    return flat(parameter.grad for parameter in replica.model.parameters())


def remembered(replica: Replica) -> list[nn.Parameter]:
    """The weights from which the next update starts: masters that are kept, or those that compute."""
    masters: Masters | None = getattr(replica, "masters", None)
    return masters.parameters if masters and masters.kept else list(replica.model.parameters())


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """A copy of all numbers of some tensors as one vector in float64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors if tensor is not None])


LEAST_EXPONENT = -50  # what is shown of a histogram that goes on


def show_seen(lab: Lab, seen: dict[str, TrainingTrace]) -> None:
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
        title = "Scale of the loss: halved by an overflow, doubled after 2000 steps without one"
        lab.chart(title, "step", "scale", scales, log_y=True)


def show_gradients(lab: Lab) -> None:
    """How large the gradients of the first step are, beside where the formats end."""
    exact = exact_replica(lab)
    exact.backward(lab.dealt(lab.batches(torch.float32), 0))
    gradient = gradient_of(exact)
    shares = by_exponent(gradient)
    scaled = {exponent + math.log2(LossScale().value): share for exponent, share in shares.items()}
    highest = max(shares.values(), default=0.0)
    curves = {"gradients": shares, "scaled by 65536": scaled}
    series = {name: [list(each), list(each.values())] for name, each in curves.items()}
    limits = torch.finfo(torch.float16)
    least = limits.smallest_normal
    ends = {"fp16 ends": least * limits.eps, "fp16 loses digits below": least, "fp16 largest": limits.max}
    series |= {name: [[math.log2(value)] * 2, [0.0, highest]] for name, value in ends.items()}
    bf16 = math.log2(torch.finfo(torch.bfloat16).smallest_normal)
    title = f"Gradients of the first step by power of two (bf16 goes on to 2^{bf16:g})"
    lab.chart(title, "exponent", "per cent", series)
    nonzero = gradient[gradient != 0].abs()
    below = [
        f"{percent((nonzero < value).double().mean().item())} below where {name}"
        for name, value in ends.items()
        if name != "fp16 largest"
    ]
    lab.say(", ".join(below) + " (of nonzero gradients, float32)", "gradients")


def by_exponent(gradient: Tensor) -> dict[float, float]:
    """Per cent of the nonzero elements whose size is in [2^e, 2^(e+1)), by e, from the least that is shown."""
    nonzero = gradient[gradient != 0].abs()
    exponents = nonzero.log2().floor().clamp(min=LEAST_EXPONENT)
    values, counts = exponents.unique(return_counts=True)
    return {float(value): 100.0 * int(count) / len(nonzero) for value, count in zip(values, counts, strict=True)}


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if math.isfinite(share) else "-"


def finite(steps: list[float], losses: list[float]) -> list[list[float]]:
    """A curve up to where its loss is no number any more."""
    known = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)]
    return [[step for step, _ in known], [loss for _, loss in known]]
