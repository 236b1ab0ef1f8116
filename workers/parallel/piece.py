"""A piece: what one rank holds of a dense tensor, said in the dense tensor's own coordinates.

Every strategy cuts its tensors another way: whole rows, whole columns, a run of a flat vector that begins in the middle
of a row. Said as boxes of the dense tensor they all fit together again, so a checkpoint of any strategy can be read by
any other number of ranks. A run of a flat vector is at most 2d - 1 boxes of a tensor of d dims: the end of its first
row, whole rows, the beginning of its last.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Box = tuple[tuple[int, ...], Tensor]  # the offset of its first element in the dense tensor, and the elements


@dataclass(frozen=True)
class Piece:
    """Some boxes of a dense tensor of `shape`, each a view of this rank's memory."""

    shape: torch.Size
    boxes: list[Box]


def flat_piece(run: Tensor, start: int, shape: torch.Size) -> Piece:
    """The piece that the 1-D `run` is, where `run[0]` is element `start` of the dense tensor, flattened."""
    return Piece(shape, boxes_of(run, start, shape))


def boxes_of(run: Tensor, start: int, shape: torch.Size) -> list[Box]:
    """The boxes of elements `start` to `start + len(run)` of a contiguous tensor of `shape`, in their order."""
    if not run.numel():
        return []
    if len(shape) <= 1:
        return [((start,), run)] if shape else [((), run.view(()))]
    row = math.prod(shape[1:])
    first, end = start // row, (start + run.numel() - 1) // row
    if start % row == 0 and (last_full := (start + run.numel()) // row) > first:
        whole = (last_full - first) * row
        box = ((first, *[0] * (len(shape) - 1)), run[:whole].view(last_full - first, *shape[1:]))
        return [box, *boxes_of(run[whole:], start + whole, shape)]
    # Within one row, the first or the last one: the rest of it, or as much as there is.
    length = min(run.numel(), row - start % row)
    inside = boxes_of(run[:length], start % row, torch.Size(shape[1:]))
    boxes = [((first, *offset), part.unsqueeze(0)) for offset, part in inside]
    return boxes + (boxes_of(run[length:], start + length, shape) if end > first else [])
