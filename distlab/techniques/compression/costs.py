"""Compressed gradients: bytes that a rank sends to sum one bucket, and where sending places stops to pay.

n is the numbers of a bucket, s their bytes each, f = 2(N-1)/N what an all_reduce sends of its tensor: under twice its
message however many ranks there are. An all_gather's bytes grow with N - 1. Sources, by method:

  topk, randomk  Stich, Cordonnier, Jaggi: Sparsified SGD with Memory (NeurIPS 2018)
  powersgd       Vogels, Karimireddy, Jaggi: PowerSGD (NeurIPS 2019), table 3: r(m + n) in place of m·n
"""

import math
from collections.abc import Sequence

from distlab.techniques.collectives.costs import algorithmic_factor
from distlab.techniques.compression.compressors import num_kept
from distlab.techniques.compression.powersgd import factors

Shapes = Sequence[Sequence[int]]  # of the gradients of one bucket

FORMULAS = {
    "dense": "f·s·n",
    "fp16": "f·2n",
    "int8": "f·(n + 4)",
    "topk": "(N-1)·(4 + s)k",
    "randomk": "f·s·k",
    "powersgd": "f·s·(sum of r(m+n) + rest)",
}


def bucket_bytes(method: str, world_size: int, shapes: Shapes, itemsize: int, *, ratio: float, low_rank: int) -> float:
    """Bytes that each rank sends to sum a bucket of gradients of `shapes`."""
    numel = sum(math.prod(shape) for shape in shapes)
    k, factor, scale = num_kept(numel, ratio), algorithmic_factor("all_reduce", world_size), max(4, itemsize)
    if method == "topk":
        return float((world_size - 1) * (4 + itemsize) * k)
    message = {
        "dense": itemsize * numel,
        "fp16": 2 * numel,
        "int8": numel + scale,
        "randomk": itemsize * k,
        "powersgd": itemsize * sum(factors(shape, low_rank) for shape in shapes),
    }[method]
    return factor * message


def bucket_calls(method: str, shapes: Shapes, low_rank: int) -> int:
    """Collectives a bucket: int8 agrees on a scale first, PowerSGD sends Q after P where it has a matrix to factor."""
    if method == "powersgd":
        return 1 + any(factors(shape, low_rank) < math.prod(shape) for shape in shapes)
    return 2 if method == "int8" else 1


def topk_pays_below(ratio: float, itemsize: int = 4) -> float:
    """The N at which top-k sends as much as a dense sum: (N-1)(4+s)·ratio·n = 2(N-1)/N·s·n."""
    return 2 * itemsize / ((4 + itemsize) * ratio)
