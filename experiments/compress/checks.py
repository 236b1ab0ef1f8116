"""The proof of compressors, whose results differ from one process's by design.

Four steps in float64, observed at every bucket. Rank 0 gets all ranks' gradients, keeps its own residuals, and computes
in one process what each rank should send (reference.py; for PowerSGD, conditions on the sum). Then

  gradients        the sum of the ranks' gradients before compression is that of one process
  formula          the sum on all ranks is the sum of what each should send by the paper's formula
  residuals        the residual that a step starts with is the one that the last step left, to the bit, three times
  sent + residual  sent and unsent parts of all ranks add up to the input: gradients and earlier residuals
  weights          after all steps, the weights are those of one process that steps by these sums
  rank             PowerSGD: no matrix of the sum has more than rank r
  replicas         all ranks have the same weights, to the bit
"""

from collections.abc import Sequence
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Size, Tensor

from distlab.contract import Build, Claims, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.tensors import TINY, Worst, largest
from distlab.lab.verify.proof import check_replicas
from distlab.lab.verify.run_all import measured
from distlab.lab.workload.reference import OneProcess, gradients, plain

from .options import Options
from .predictions import METHOD_OF, METHODS, TORCHS, bucket_members, bucket_shapes
from .reference import (
    ROUNDING,
    Projection,
    Reference,
    Witness,
    added,
    factored,
    watch_buckets,
)

PROVEN_STEPS = 4
TOLERANCE = 1e-12  # relative to the largest number that is summed
RANK_RTOL = 1e-10  # smaller singular values, relative to the largest, are rounding


def to_buckets(tensors: Sequence[Tensor], members: list[list[int]]) -> list[Tensor]:
    """Return one flat tensor per bucket from one tensor per parameter."""
    return [torch.cat([tensors[index].flatten() for index in bucket]) for bucket in members]


def to_parameters(sums: list[Tensor], parameters: Sequence[Tensor], members: list[list[int]]) -> list[Tensor]:
    """Return one tensor per parameter from one per bucket."""
    order = [index for bucket in members for index in bucket]
    pieces = torch.cat(sums).split([parameters[index].numel() for index in order])
    return [piece for _, piece in sorted(zip(order, pieces, strict=True), key=itemgetter(0))]


def prove_by_formula(lab: Lab, name: str, build: Build) -> None:
    config = plain(lab.config)
    feedback = config.own(Options).error_feedback
    strategy = build(lab.model(torch.float64), lab.mesh, config)
    witnesses = watch_buckets(strategy)
    shapes = bucket_shapes(config, 8)
    references = [
        Projection(config, bucket, feedback=feedback)
        if name == "powersgd"
        else Reference(METHOD_OF[name], config, feedback=feedback)
        for bucket in shapes
    ]
    alone, batches = OneProcess(lab.model(torch.float64), config), lab.batches(torch.float64, proof=True)
    members = bucket_members(config, 8)
    worst = Worst(("gradients", "formula", *(["sent + residual"] if feedback else []), "weights"))
    for step in range(PROVEN_STEPS):
        lab.at(step, f"proof of {name}")
        strategy.backward(lab.microbatches(batches, step))
        strategy.update()
        lab.stepped()
        lab.at(step, f"one process, beside {name}")
        wanted: Sequence[Tensor | None] = [None] * len(witnesses)
        if lab.rank == 0:
            wanted = to_buckets(gradients(alone.model, [batches.full(step)])[1], members)
        # Relative to the largest gradient of all: that of a key's bias is only rounding.
        size = max([TINY, *(largest(dense) for dense in wanted if dense is not None)])
        for witness, reference, dense in zip(witnesses, references, wanted, strict=True):
            for check, value in differences(lab, witness, reference, dense).items():
                if check in worst.found:
                    worst.note(check, value / size if check == "gradients" else value, where=f"step {step}")
        sums = to_parameters([witness.total for witness in witnesses], alone.trained, members)
        weights = alone.step_by(sums) if lab.rank == 0 else None
        worst.compare("weights", strategy.full("weights"), weights, where=f"step {step}")
    for check, off in worst.found.items() if lab.rank == 0 else ():
        rounding = (lab.world_size - 1) * ROUNDING.get(name, 0.0) if check == "formula" else 0.0
        lab.check(check, off.value, TOLERANCE + rounding, name, off.where)
    if feedback:
        lost = max(witness.lost for witness in witnesses)
        lab.check("residuals", lost, 0.0, name, f"over {PROVEN_STEPS - 1} steps")
    if name == "powersgd" and lab.rank == 0:
        check_rank(lab, name, witnesses, shapes)
    check_replicas(lab, name, strategy)


def differences(
    lab: Lab, witness: Witness, reference: Reference | Projection, dense: Tensor | None
) -> dict[str, float]:
    """Return one bucket's errors of the last step on rank 0, relative to what is summed; `dense` is one process's
    gradient, whose error is relative to the gradients."""
    gradients_by_rank = [torch.empty_like(witness.gradient) for _ in range(lab.world_size)] if lab.rank == 0 else None
    dist.gather(witness.gradient, gradients_by_rank, group=lab.group, group_dst=0)
    sums = torch.stack([witness.before, witness.after, witness.before.abs()])
    dist.reduce(sums, group=lab.group, group_dst=0)
    if gradients_by_rank is None or dense is None:
        return {}
    before, after, size = sums
    total_input = added(gradients_by_rank) + before
    size = size + added([each.abs() for each in gradients_by_rank])
    # The message is compared after decoding; rounding of the sum at each hop is in no residual.
    formula, sent = reference.judge(gradients_by_rank, witness.total)
    return {
        "gradients": largest(added(gradients_by_rank) - dense),
        "formula": formula,
        "sent + residual": largest(sent + after - total_input) / max(largest(size), TINY),
    }


def check_rank(lab: Lab, name: str, witnesses: list[Witness], shapes: list[list[Size]]) -> None:
    low_rank = lab.config.own(Options).low_rank
    ranks = [rank_of(witness.total, bucket, low_rank) for witness, bucket in zip(witnesses, shapes, strict=True)]
    detail = f"how far the rank of a matrix of the sum exceeds {low_rank}"
    lab.check("rank", max(0, max(ranks) - low_rank), 0, name, detail)


def rank_of(total: Tensor, shapes: list[Size], rank: int) -> int:
    """Return the highest rank of any matrix of a bucket's sum that was sent in factors of `rank`."""
    pieces = total.split([shape.numel() for shape in shapes])
    matrices = [piece.view(shape[0], -1) for shape, piece in zip(shapes, pieces, strict=True) if factored(shape, rank)]
    return max((int(torch.linalg.matrix_rank(matrix, rtol=RANK_RTOL)) for matrix in matrices), default=0)


# The checks that a run of compression must contain, so that a missing one is noticed.


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """Return the checks: bytes and calls of all variants by hand, and each method's properties."""
    proof, feedback = config.proof, config.own(Options).error_feedback
    compared = ("losses beside ours", "gradients beside ours")
    return (
        *measured(mode, config, not_compared=(*METHODS, *TORCHS, "plain")),
        Claims(("called bytes", "wire bytes", "rest bytes", "calls"), mode.by_hand),
        Claims(("replicas",), (*mode.by_hand, *mode.by_torch), when=proof),
        Claims(
            ("gradients", "weights"),
            METHODS,
            one=True,
            when=proof,
            fails_in="test_errors_before_compression_fail_the_run",
        ),
        Claims(("formula",), METHODS, one=True, when=proof),
        Claims(("rank",), ("powersgd",), one=True, when=proof),
        Claims(compared, tuple(TORCHS), when=proof, fails_in="test_differences_to_pytorchs_hooks_fail_the_run"),
        Claims(("sent + residual",), METHODS, one=True, when=proof and feedback),
        Claims(("residuals",), METHODS, when=proof and feedback, fails_in="test_wrong_residuals_fail_the_run"),
    )
