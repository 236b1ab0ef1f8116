"""A table of what 16 bits lost during training."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn

from distlab.contract import Build
from distlab.lab.lab import Lab
from distlab.lab.verify.proof import summed_losses
from distlab.lab.workload.data import Microbatch
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica
from distlab.techniques.precision import Masters

# Numbers lost in 16 bits: gradients that became zero or left the range, and updates without effect.
#
# Each variant is trained again and observed around each update, outside the timed steps. Underflow is found by
# comparison with the float32 gradient of the same samples at the same weights, element by element.


@dataclass
class TrainingTrace:
    """Records of one variant's training: a value per step, over all P elements."""

    loss_parts: list[float | None] = field(default_factory=list)  # of the loss, this rank's
    losses: list[float] = field(default_factory=list)  # of the batch, on rank 0
    scales: list[float] = field(default_factory=list)
    overflowed: list[int] = field(default_factory=list)  # elements of the gradient that are inf or NaN
    # Share that is zero but not in float32: first and last step.
    underflowed: list[float] = field(default_factory=list)
    # Share of nonzero gradients whose update did not change the weight.
    vanished: list[float] = field(default_factory=list)
    skipped: int = 0


def observe(lab: Lab, name: str, build: Build) -> TrainingTrace:
    """Train LAB_STEPS steps, and record the losses of precision."""
    batches, trace = lab.batches(torch.float32), TrainingTrace()
    strategy = build(lab.model(torch.float32), lab.mesh, lab.config)
    assert isinstance(strategy, Replica)
    exact = exact_replica(lab)
    for step in range(lab.config.steps):
        lab.at(step, f"{name} observed")
        parts = lab.microbatches(batches, step)
        trace.scales.append(strategy.scale)
        trace.loss_parts.append(strategy.backward(parts).item())
        gradient = gradient_of(strategy)
        trace.overflowed.append(int((~gradient.isfinite()).sum()))
        if step in (0, lab.config.steps - 1):
            lost = (gradient == 0) & (gradient_at(strategy, exact, parts) != 0)
            trace.underflowed.append(math.nan if trace.overflowed[-1] else lost.double().mean().item())
        before = flat(stepped_weights(strategy))
        strategy.update()
        if strategy.scale < trace.scales[-1]:
            trace.skipped += 1
        elif not trace.overflowed[-1]:
            moved = gradient != 0
            unmoved = (flat(stepped_weights(strategy)) == before) & moved
            trace.vanished.append((unmoved.sum() / moved.sum().clamp(min=1)).item())
        lab.work.advance()
    trace.losses = summed_losses(lab, trace.loss_parts)
    return trace


def exact_replica(lab: Lab) -> Replica:
    """Return a replica in float32, for its gradients only."""
    model = lab.model(torch.float32)
    return Replica(model, lab.config, GradientBuckets(model.parameters(), lab.group, float("inf"), overlap=False))


@torch.no_grad()
def copy_weights(source: Replica, target: Replica) -> None:
    for source_weight, target_weight in zip(source.model.parameters(), target.model.parameters(), strict=True):
        target_weight.copy_(source_weight)


def gradient_at(strategy: Replica, exact: Replica, parts: list[Microbatch]) -> Tensor:
    """Return the float32 gradient over all ranks, at `strategy`'s computing weights."""
    copy_weights(strategy, exact)
    exact.backward(parts)
    return gradient_of(exact)


def gradient_of(replica: Replica) -> Tensor:
    return flat(parameter.grad for parameter in replica.model.parameters())


def stepped_weights(replica: Replica) -> list[nn.Parameter]:
    """Return the weights that the next update changes: permanent masters, or the computing weights."""
    masters: Masters | None = getattr(replica, "masters", None)
    return masters.parameters if masters and masters.persistent else list(replica.model.parameters())


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """Return a copy of all numbers of some tensors as one float64 vector."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors if tensor is not None])


def show_traces(lab: Lab, traces: dict[str, TrainingTrace]) -> None:
    if lab.rank != 0:
        return
    columns = [
        "variant",
        "underflow, first step",
        "last step",
        "inf or NaN",
        "skipped",
        "scale",
        "updates without effect",
    ]
    rows = [
        [
            name, *(percent(share) for share in (each.underflowed[0], each.underflowed[-1])),
            f"{sum(each.overflowed)} in {sum(map(bool, each.overflowed))} steps", each.skipped, f"{each.scales[-1]:g}",
            percent(fmean(each.vanished)) if each.vanished else "-", each.losses[0], each.losses[-1],
        ]
        for name, each in traces.items()
    ]  # fmt: skip
    lab.table(
        f"What {lab.config.steps} steps lost: share of gradients that underflow to zero, and of updates without effect",
        [*columns, "first loss", "last loss"],
        rows,
    )


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if math.isfinite(share) else "-"
