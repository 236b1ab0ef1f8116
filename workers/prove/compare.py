"""How far each tensor of a rank is from one process's, step by step, and whether the ranks together train all of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from workers.measure import difference
from workers.measure.difference import factor
from workers.prove.dense import LEARNING_RATE, Dense
from workers.prove.held import Rows
from workers.prove.trainee import Found
from workers.workload.baseline import Snapshot

TOLERANCE = 1e-11  # of the largest value of all tensors of a kind, or of one where that is more
CLIP_EPSILON = 1e-6  # torch's clip_grad_norm_ adds it to the norm; whoever clips by hand need not
GRADIENTS, WEIGHTS, LOSSES = "gradients", "weights", "losses"


class Deviation(NamedTuple):
    """One tensor of one rank after one step."""

    step: int
    kind: str
    name: str  # as the rank has it
    rank: int
    difference: float  # the largest; infinite where it is missing or no number
    allowed: float
    factor: float | None  # of one process's, where it is a multiple of that
    shape: tuple[int, ...]


class Step(NamedTuple):
    """What a rank has kept of one step."""

    share: float | None
    gradients: Mapping[str, Found]
    weights: Mapping[str, Found]

    def of(self, kind: str) -> Mapping[str, Found]:
        """One kind."""
        return self.gradients if kind == GRADIENTS else self.weights


def compared(
    rank: int, steps: Sequence[Step], dense: Dense, canonical: Mapping[str, str], clip: float | None
) -> list[Deviation]:
    """Every tensor of a rank beside one process's."""
    found = []
    for number, (step, alone) in enumerate(zip(steps, dense.steps, strict=True)):
        for kind in (GRADIENTS, WEIGHTS):
            wanted = alone.gradients if kind == GRADIENTS else alone.weights
            allowed = tolerance(wanted.values(), alone, clip) * (LEARNING_RATE if kind == WEIGHTS and clip else 1.0)
            for name, each in step.of(kind).items():
                difference, times = apart(each, wanted.get(canonical[name]))
                shape = () if each.tensor is None else tuple(each.tensor.shape)
                found.append(Deviation(number, kind, name, rank, difference, allowed, times, shape))
    return found


def apart(found: Found, dense: Tensor | None) -> tuple[float, float | None]:
    """The largest difference, and the factor where there is one."""
    wanted = None if dense is None else found.rows.of(dense)
    if found.tensor is None or wanted is None:
        given = found.tensor if wanted is None else wanted
        missing = given is not None and bool(given.any())
        # A gradient that one process has not may be zeros here; one that is zero there may be missing here.
        return (math.inf if missing else 0.0), None
    off = difference.apart(found.tensor.double(), wanted)
    return off, factor(found.tensor.double(), wanted) if math.isfinite(off) else None


def tolerance(wanted: Iterable[Tensor], alone: Snapshot, clip: float | None) -> float:
    """What rounding may change, and with a clip what its epsilon may."""
    largest = max((each.abs().max().item() for each in wanted if each.numel()), default=0.0)
    epsilon = 0.0 if clip is None else CLIP_EPSILON / max(alone.norm, CLIP_EPSILON)
    return TOLERANCE * max(1.0, largest) + epsilon * largest


def not_held(
    rows_by_rank: Sequence[Mapping[str, Rows]], canonical: Mapping[str, str], dense: Dense
) -> list[tuple[str, list[int]]]:
    """Parameters that no rank has, and of those that are cut the rows that none has; an empty list is all of it."""
    held: dict[str, set[int] | None] = {}
    dims: dict[str, int] = {}
    for rows in rows_by_rank:
        for name, each in rows.items():
            target = canonical[name]
            if each.dim < 0:
                held[target] = None
            elif held.setdefault(target, set()) is not None:
                own = held[target]
                assert own is not None
                own.update(each.lines)
                dims[target] = each.dim
    missing = [(name, list[int]()) for name in dense.start if name not in held]
    for name, own in held.items():
        if own is not None:
            rest = sorted(set(range(dense.start[name].shape[dims[name]])) - own)
            missing += [(name, rest)] if rest else []
    return missing
