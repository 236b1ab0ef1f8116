"""How a compressor is proven that does not compute what one process computes.

Three steps in float64, watched at every bucket. Rank 0 gets all ranks' gradients and residuals, and computes in one
process what each should have sent (reference.py; for PowerSGD what its sum has to satisfy, subspace.py). Then

  formula          the sum that all ranks hold is the sum of what each should have sent, by the paper's formula
  sent + residual  what was sent and what is left over all ranks is what came in: gradients, and residuals of before
  rank             PowerSGD: no matrix of the sum has more than rank r
  limit            a gradient that the method can say whole comes out as the dense sum (limits.py)
  replicas         all ranks hold the same weights, to the bit
"""

import torch
import torch.distributed as dist
from torch import Size, Tensor

from experiments.compress.limits import limit_difference
from experiments.compress.predictions import METHODS, OURS, bucket_shapes, own
from experiments.compress.reference import ROUNDING, TINY, Reference, added, largest
from experiments.compress.subspace import Projection
from experiments.compress.witness import Witness, watched
from workers.contract import Build
from workers.lab import Lab
from workers.parallel.lowrank import pays
from workers.passes.replicas import check_replicas

STEPS = 3
LEARNING_RATE = 0.01
TOLERANCE = 1e-12  # over the largest number that is summed
RANK_RTOL = 1e-10  # singular values below it, over the largest one, are rounding


def by_the_formula(lab: Lab, name: str, build: Build) -> None:
    """The proof of one of our variants."""
    config = lab.config.model_copy(update={"optimizer": "sgd", "clip": None, "lr": LEARNING_RATE})
    method, feedback = OURS[name], own(config).error_feedback and name in METHODS
    strategy = build(lab.model(torch.float64), lab.mesh, config)
    _, witnesses = watched(strategy)
    shapes = bucket_shapes(config, 8, name)
    references = [
        Projection(config, of) if method == "powersgd" else Reference(method, config, feedback=feedback)
        for of in shapes
    ]
    batches = lab.batches(torch.float64, proof=True)
    worst = {"formula": 0.0} | ({"sent + residual": 0.0} if feedback else {})
    for step in range(STEPS):
        lab.at(step, f"proof of {name}")
        strategy.backward(lab.dealt(batches, step))
        strategy.update()
        lab.stepped()
        for witness, reference in zip(witnesses, references, strict=True):
            found = differences(lab, witness, reference)
            worst = {check: max(value, found.get(check, 0.0)) for check, value in worst.items()}
    for check, value in worst.items() if lab.rank == 0 else ():
        rounding = (lab.world_size - 1) * ROUNDING.get(method, 0.0) if check == "formula" else 0.0
        lab.check(check, value, TOLERANCE + rounding, name)
    if method == "powersgd" and lab.rank == 0:
        low_rank = own(config).low_rank
        ranks = [rank_of(witness.total, of, low_rank) for witness, of in zip(witnesses, shapes, strict=True)]
        detail = f"ranks above {low_rank} of a matrix of the sum"
        lab.check("rank", max(0, max(ranks) - low_rank), 0, name, detail)
    lab.check("limit", limit_difference(lab, method, build), TOLERANCE, name)
    check_replicas(lab, name, strategy)


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


def rank_of(total: Tensor, shapes: list[Size], rank: int) -> int:
    """The highest rank of any matrix of a bucket's sum that was sent in factors of `rank`."""
    pieces = total.split([shape.numel() for shape in shapes])
    matrices = [piece.view(shape[0], -1) for shape, piece in zip(shapes, pieces, strict=True) if pays(shape, rank)]
    return max((int(torch.linalg.matrix_rank(matrix, rtol=RANK_RTOL)) for matrix in matrices), default=0)
