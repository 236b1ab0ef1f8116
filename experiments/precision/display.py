"""What 16 bits lost on the way, by a training that is looked at: a table."""

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


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if math.isfinite(share) else "-"
