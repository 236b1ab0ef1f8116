"""How far two sets of named tensors are apart: what a proof is decided by."""

import math
from collections.abc import Iterable

from torch import Tensor


def difference(found: Iterable[tuple[str, Tensor]], wanted: dict[str, Tensor] | None) -> float:
    """The largest absolute difference, infinite where a tensor is missing, unknown or of another shape.

    `found` is consumed on every rank, since it is a collective; `wanted` is None where a rank holds no dense run.
    """
    largest, names = 0.0, set()
    for name, tensor in found:
        names.add(name)
        if wanted is None or not tensor.numel():
            continue
        if name not in wanted or wanted[name].shape != tensor.shape:
            largest = math.inf
        else:
            largest = larger(largest, (tensor - wanted[name]).abs().max().item())
    return math.inf if wanted is not None and names != set(wanted) else largest


def larger(one: float, other: float) -> float:
    """The larger of two differences, where not a number is the largest of all."""
    return math.inf if math.isnan(one) or math.isnan(other) else max(one, other)
