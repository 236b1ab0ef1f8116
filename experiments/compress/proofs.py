"""How a compressor is proven that does not compute what one process computes.

Three steps in float64, watched at every bucket. Rank 0 gets all ranks' gradients and residuals, and computes in one
process what each should have sent (reference.py; for PowerSGD what its sum has to satisfy, subspace.py). Then

  formula          the sum that all ranks hold is the sum of what each should have sent, by the paper's formula
  sent + residual  what was sent and what is left over all ranks is what came in: gradients, and residuals of the step before
  rank             PowerSGD: no matrix of the sum has more than rank r
  limit            a gradient that the method can say whole comes out as the dense sum (limits.py)
  replicas         all ranks hold the same weights, to the bit
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor

from experiments.compress.claims import bucket_shapes
from experiments.compress.limits import limit_difference
from experiments.compress.reference import ROUNDING, TINY, Reference, added, largest
from experiments.compress.subspace import Projection
from workers.lab import Lab, Variant
from workers.parallel.compression import Handle
from workers.parallel.lowrank import pays
from workers.passes.replicas import check_replicas

STEPS = 3
LEARNING_RATE = 0.01
TOLERANCE = 1e-12  # over the largest number that is summed
RANK_RTOL = 1e-10  # singular values below it, over the largest one, are rounding


class Witness:
    """A bucket's AllReduce that writes down what it gets, gives and keeps, in the last step on this rank, flat."""

    values: Tensor  # gradient, and residual before
    rest: Tensor  # residual after
    total: Tensor  # what all ranks then hold as their sum

    def __init__(self, watched: Any, shapes: list[Size]) -> None:
        self.watched, self.shapes = watched, shapes

    def __call__(self, bucket: Tensor) -> Handle:
        self.values = bucket + self.residual(bucket)
        handle = self.watched(bucket)

        def end() -> None:
            handle.wait()
            self.rest, self.total = self.residual(bucket).clone(), bucket.clone()

        return Handle(end)

    def residual(self, like: Tensor) -> Tensor:
        residual: Tensor | None = self.watched.residual
        return torch.zeros_like(like) if residual is None else residual


def by_the_formula(lab: Lab, method: str, *, feedback: bool) -> Callable[[Variant], None]:
    """The proof of a variant that sends through `method`."""

    def prove(build: Variant) -> None:
        name = build.__name__
        config = lab.config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": LEARNING_RATE})
        strategy: Any = build(lab.model(torch.float64), lab.group, config)
        buckets = strategy.gradients
        shapes = bucket_shapes(config, itemsize=8)
        witnesses = [Witness(watched, of) for watched, of in zip(buckets.all_reduces, shapes, strict=True)]
        buckets.all_reduces[:] = witnesses
        references = [
            Projection(config, of) if method == "powersgd" else Reference(method, config, feedback=feedback)
            for of in shapes
        ]
        batches = lab.batches(torch.float64, proof=True)
        worst = {"formula": 0.0} | ({"sent + residual": 0.0} if feedback else {})
        for step in range(STEPS):
            lab.at(step, f"proof of {name}")
            strategy.backward(batches.dealt(step, lab.rank, lab.world_size))
            strategy.update()
            lab.stepped()
            for witness, reference in zip(witnesses, references, strict=True):
                found = differences(lab, witness, reference)
                worst = {check: max(value, found.get(check, 0.0)) for check, value in worst.items()}
        for check, value in worst.items() if lab.rank == 0 else ():
            rounding = (lab.world_size - 1) * ROUNDING.get(method, 0.0) if check == "formula" else 0.0
            lab.check(check, value, TOLERANCE + rounding, name)
        if method == "powersgd" and lab.rank == 0:
            excess = max(rank_of(witness, config.low_rank) for witness in witnesses) - config.low_rank
            lab.check("rank", max(0, excess), 0, name, f"ranks above {config.low_rank} of a matrix of the sum")
        lab.check("limit", limit_difference(lab, method, feedback=feedback), TOLERANCE, name)
        check_replicas(lab, name, strategy)

    return prove


def differences(lab: Lab, witness: Witness, reference: Reference | Projection) -> dict[str, float]:
    """Of one bucket's last step, on rank 0: how far its claims are off, over what is summed."""
    values = [torch.empty_like(witness.values) for _ in range(lab.world_size)] if lab.rank == 0 else None
    dist.gather(witness.values, values, group=lab.group, group_dst=0)
    rest = witness.rest.clone()
    dist.reduce(rest, group=lab.group, group_dst=0)
    if values is None:
        return {}
    formula, sent = reference.judge(values, witness.total)
    left = sent + rest - added(values)
    return {
        "formula": formula,
        "sent + residual": largest(left) / max(largest(added([each.abs() for each in values])), TINY),
    }


def rank_of(witness: Witness, rank: int) -> int:
    """The highest rank of any matrix of the sum that was sent in factors of `rank`."""
    pieces = witness.total.split([shape.numel() for shape in witness.shapes])
    matrices = [
        piece.view(shape[0], -1) for shape, piece in zip(witness.shapes, pieces, strict=True) if pays(shape, rank)
    ]
    return max((int(torch.linalg.matrix_rank(matrix, rtol=RANK_RTOL)) for matrix in matrices), default=0)
