"""A piece: one rank's part of a dense tensor, described in the coordinates of the dense tensor.

Every strategy cuts its tensors differently: whole rows, whole columns, a run of a flat vector that begins in the middle
of a row. Described as boxes of the dense tensor they all fit together, so any number of ranks can read any strategy's
checkpoint. A run of a flat vector is at most 2d - 1 boxes of a tensor of d dims: the end of its first row, whole rows,
the beginning of its last.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.techniques.collectives.plain_values import all_gather_plain
from distlab.techniques.collectives.point_to_point import Peers, sendable

Block = tuple[tuple[int, ...], Tensor]  # offset in the dense tensor, and the elements


@dataclass(frozen=True)
class LocalShard:
    """Boxes of a dense tensor of `shape`, each a view of this rank's memory."""

    shape: torch.Size
    boxes: list[Block]


def whole_piece(tensor: Tensor) -> LocalShard:
    """Return a piece with all of a tensor."""
    return LocalShard(tensor.shape, [((0,) * tensor.dim(), tensor)])


def flat_piece(run: Tensor, start: int, shape: torch.Size) -> LocalShard:
    """Return the piece of the 1-D `run`, where `run[0]` is element `start` of the flattened dense tensor."""
    return LocalShard(shape, boxes_of(run, start, shape))


def boxes_of(run: Tensor, start: int, shape: torch.Size) -> list[Block]:
    """Return the boxes of elements `start` to `start + len(run)` of a contiguous tensor of `shape`, in order."""
    if not run.numel():
        return []
    if len(shape) <= 1:
        return [((start,), run)] if shape else [((), run.view(()))]
    row = math.prod(shape[1:])
    first, end = start // row, (start + run.numel() - 1) // row
    if start % row == 0 and (last_full := (start + run.numel()) // row) > first:
        full = (last_full - first) * row
        box = ((first, *[0] * (len(shape) - 1)), run[:full].view(last_full - first, *shape[1:]))
        return [box, *boxes_of(run[full:], start + full, shape)]
    # Within the first or the last row: the rest of the row, or as much as there is.
    length = min(run.numel(), row - start % row)
    inside = boxes_of(run[:length], start % row, torch.Size(shape[1:]))
    boxes = [((first, *offset), part.unsqueeze(0)) for offset, part in inside]
    return boxes + (boxes_of(run[length:], start + length, shape) if end > first else [])


# Dense tensors from the parts on all ranks, however they were cut: every rank sends its boxes once, rank 0 assembles.
#
# A tensor may be cut along several axes, such as a stage's slice in shards. Each rank knows the position of its parts
# in the dense tensor, so the cuts need not be undone one after the other. If several ranks have a part, one of them
# sends it; a tensor with a missing or repeated part is an error.

Labelled = tuple[str, LocalShard]


class Place(NamedTuple):
    """The position of a box in a dense tensor."""

    label: str
    dense: torch.Size
    offset: tuple[int, ...]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the number of bytes to send."""
        return self.shape.numel() * self.dtype.itemsize


def assembled(pieces: Sequence[Labelled], peers: Peers) -> Iterator[tuple[str, Tensor]]:
    """Yield the dense tensors of all ranks' `pieces` on rank 0 of `peers`, by label in the order of their first box;
    nothing elsewhere. A collective. Raises ValueError if the boxes do not make up a whole tensor."""
    boxes = [(label, piece.shape, *block) for label, piece in pieces for block in piece.boxes]
    mine = [Place(label, dense, offset, box.shape, box.dtype) for label, dense, offset, box in boxes]
    parts = [box.reshape(-1).view(torch.uint8) for *_, box in boxes]  # as bytes, since their types differ
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    everyone = all_gather_plain(mine, peers.group, [Place], root=0)
    tag = peers.new_tag()
    if peers.rank:
        peers.send(tag, 0, sendable(flat, peers)).wait()
        return
    sizes = [sum(place.nbytes for place in places) for places in everyone]
    host = None if peers.batched else "cpu"
    buffers = {rank: flat.new_empty(size, device=host) for rank, size in enumerate(sizes) if rank}
    for message in peers.post(tag, receives=list(buffers.items()))[0]:
        message.wait()
    yield from put_together(everyone, {0: flat} | buffers)


def put_together(places: Sequence[Sequence[Place]], flats: dict[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors from every rank's boxes, which are end to end in its flat tensor."""
    dense: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for rank, rank_places in enumerate(places):
        parts = flats[rank].to(flats[0].device).split([place.nbytes for place in rank_places])
        for place, part in zip(rank_places, parts, strict=True):
            box = part.clone().view(place.dtype)  # a copy, for the alignment of this dtype
            if place.label not in dense:
                dense[place.label], filled[place.label] = box.new_empty(place.dense), 0
            ends = (slice(first, first + length) for first, length in zip(place.offset, place.shape, strict=True))
            dense[place.label][tuple(ends)] = box.view(place.shape)
            filled[place.label] += box.numel()
    for label, tensor in dense.items():
        if filled[label] != tensor.numel():
            raise ValueError(f"{label} has {tensor.numel()} elements, but all ranks together have {filled[label]}")
        yield label, tensor
