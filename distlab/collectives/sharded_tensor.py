"""A piece: what one rank holds of a dense tensor, said in the dense tensor's own coordinates.

Every strategy cuts its tensors another way: whole rows, whole columns, a run of a flat vector that begins in the middle
of a row. Said as boxes of the dense tensor they all fit together again, so a checkpoint of any strategy can be read by
any other number of ranks. A run of a flat vector is at most 2d - 1 boxes of a tensor of d dims: the end of its first
row, whole rows, the beginning of its last.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.collectives.point_to_point import Peers, sendable
from distlab.transport import store

Block = tuple[tuple[int, ...], Tensor]  # the offset of its first element in the dense tensor, and the elements


@dataclass(frozen=True)
class LocalShard:
    """Some boxes of a dense tensor of `shape`, each a view of this rank's memory."""

    shape: torch.Size
    boxes: list[Block]


def flat_piece(run: Tensor, start: int, shape: torch.Size) -> LocalShard:
    """The piece that the 1-D `run` is, where `run[0]` is element `start` of the dense tensor, flattened."""
    return LocalShard(shape, boxes_of(run, start, shape))


def boxes_of(run: Tensor, start: int, shape: torch.Size) -> list[Block]:
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


# Dense tensors from what many ranks hold, whatever cut them: every rank sends its boxes once, the first puts them in
# place.
#
# A tensor may be cut along several axes at once, a stage's slice in shards. Each rank knows where its parts stand in
# the dense tensor (below), so nobody has to undo the cuts one after the other. What several ranks hold, one of
# them sends; a tensor of which a part is missing, or there twice, is an error.

Labelled = tuple[str, LocalShard]


class Place(NamedTuple):
    """Where a box belongs."""

    label: str
    dense: torch.Size
    offset: tuple[int, ...]
    shape: torch.Size


def assembled(pieces: Sequence[Labelled], peers: Peers) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors of all ranks' `pieces`, of one dtype, on rank 0 of `peers`, by label in the order of their
    first box; nothing elsewhere. A collective. Raises ValueError if the boxes of a tensor are not the whole of it."""
    mine = [
        (Place(label, piece.shape, offset, box.shape), box) for label, piece in pieces for offset, box in piece.boxes
    ]
    flat = torch.cat([box.reshape(-1) for _, box in mine]) if mine else torch.empty(0)
    everyone = store.all_gather_plain(([place for place, _ in mine], flat.dtype), peers.group, [Place])
    tag = peers.new_tag()
    if peers.rank:
        peers.post(tag, sends=[(0, sendable(flat, peers))])[1][0].wait()
        return
    numels = [sum(place.shape.numel() for place in places) for places, _ in everyone]
    buffers = {
        rank: torch.empty(numels[rank], dtype=dtype, device=flat.device if peers.batched else "cpu")
        for rank, (_, dtype) in enumerate(everyone)
        if rank
    }
    for message in peers.post(tag, receives=list(buffers.items()))[0]:
        message.wait()
    yield from put_together([places for places, _ in everyone], {0: flat} | buffers)


def put_together(places: Sequence[Sequence[Place]], flats: dict[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every rank's boxes, end to end in its flat tensor, at their places."""
    dense: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for rank, of_rank in enumerate(places):
        boxes = flats[rank].to(flats[0].device).split([place.shape.numel() for place in of_rank])
        for place, box in zip(of_rank, boxes, strict=True):
            if place.label not in dense:
                dense[place.label], filled[place.label] = box.new_empty(place.dense), 0
            ends = (slice(first, first + length) for first, length in zip(place.offset, place.shape, strict=True))
            dense[place.label][tuple(ends)] = box.view(place.shape)
            filled[place.label] += box.numel()
    for label, tensor in dense.items():
        if filled[label] != tensor.numel():
            raise ValueError(
                f"{label} has {tensor.numel()} elements, and all ranks together hold {filled[label]} of it"
            )
        yield label, tensor
