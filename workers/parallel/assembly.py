"""Dense tensors from what many ranks hold, whatever cut them: every rank sends its boxes once, the first puts them in
place.

A tensor may be cut along several axes at once, a stage's slice in shards. Each rank knows where its parts stand in the
dense tensor (piece.py), so nobody has to undo the cuts one after the other. What several ranks hold, one of them sends;
a tensor of which a part is missing, or there twice, is an error.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.parallel import plain
from workers.parallel.boundaries import sendable
from workers.parallel.peers import Peers
from workers.parallel.piece import Piece

Labelled = tuple[str, Piece]


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
    everyone = plain.everyone(([place for place, _ in mine], flat.dtype), peers.group, [Place])
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
