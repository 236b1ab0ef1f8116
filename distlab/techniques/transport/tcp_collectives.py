"""The collectives of a process group over plain TCP, for all tensors that torch may pass: any layout, any operation.

Messages are contiguous; other tensors are copied before, and results back. Small sums go through rank 0 (rooted.py),
all else directly from rank to rank (direct.py): one round and the fewest bytes, also for parts of different length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distlab.techniques.collectives import direct, rooted
from distlab.techniques.collectives.by_hand import pick_over_tcp
from distlab.techniques.collectives.point_to_point import Peers, Steps

SUMS = (ReduceOp.SUM, ReduceOp.AVG)
FOLDS: Mapping[Any, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def fold_of(op: Any) -> Callable[..., Tensor]:
    """Return the function that combines two tensors; raises ValueError for operations without one."""
    if op not in FOLDS:
        allowed = ", ".join(each.name for each in FOLDS)
        raise ValueError(f"the backend tcp has no operation {getattr(op, 'name', op)}, allowed: {allowed}")
    return FOLDS[op]


def rows_of(tensor: Tensor, parts: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Return the parts of a tensor along dim 0: of these `sizes`, or equal ones."""
    return list(tensor.split(list(sizes)) if sizes else tensor.chunk(parts) if tensor.dim() else [tensor])


def flat(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, as one contiguous dim."""
    if tensor.device.type != "cpu":
        raise ValueError(f"the backend tcp sends no tensor on {tensor.device}, allowed: cpu")
    return tensor.detach().contiguous().view(-1)


@contextmanager
def contiguous(*places: Tensor) -> Iterator[list[Tensor]]:
    """Yield the places as flat tensors; at the end, what was written there is copied back."""
    pieces = [flat(place) for place in places]
    yield pieces
    for place, piece in zip(places, pieces, strict=True):
        if piece.data_ptr() != place.data_ptr():
            place.copy_(piece.view(place.shape))


def all_reduce(peers: Peers, tensor: Tensor, op: Any) -> Steps:
    """Sum (or another operation) over all ranks, in place."""
    with contiguous(tensor) as (piece,):
        name = pick_over_tcp("all_reduce", piece.nbytes, peers.world_size)
        if op in SUMS and peers.world_size > 1 and name != "server":
            yield from direct.all_reduce(peers, piece)
        else:
            yield from rooted.all_reduce(peers, piece, fold_of(op))
        average(peers, piece, op)


def average(peers: Peers, piece: Tensor, op: Any) -> None:
    """Divide the sum by the number of ranks, if the operation is a mean."""
    if op == ReduceOp.AVG:
        piece.div_(peers.world_size)


def reduce(peers: Peers, tensor: Tensor, op: Any, root: int) -> Steps:
    """Like all_reduce, with the result on the root only."""
    with contiguous(tensor) as (piece,):
        yield from rooted.reduce(peers, piece, root, fold_of(op))
        if peers.rank == root:
            average(peers, piece, op)


def reduce_scatter(peers: Peers, place: Tensor, parts: Sequence[Tensor], op: Any) -> Steps:
    """Sum everyone's part r into rank r's `place`."""
    chunks = [flat(part) for part in parts]
    with contiguous(place) as (piece,):
        if peers.world_size == 1:
            piece.copy_(chunks[0])
        else:
            sent = yield from direct.sum_own(peers, chunks, piece, fold_of(op))
            yield from sent
        average(peers, piece, op)


def broadcast(peers: Peers, tensor: Tensor, root: int) -> Steps:
    """Copy the root's `tensor` to every rank."""
    with contiguous(tensor) as (piece,):
        yield from rooted.broadcast(peers, piece, root)


def all_gather(peers: Peers, places: Sequence[Tensor], tensor: Tensor) -> Steps:
    """Copy everyone's `tensor` to everyone's `places`."""
    return all_to_all(peers, places, [tensor] * peers.world_size)


def gather(peers: Peers, places: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
    """Copy everyone's `tensor` to the root's `places`; other ranks have none."""
    with contiguous(*places) as pieces:
        yield from rooted.gather(peers, pieces, flat(tensor), root)


def scatter(peers: Peers, place: Tensor, parts: Sequence[Tensor], root: int) -> Steps:
    """Copy the root's part r to rank r's `place`."""
    with contiguous(place) as (piece,):
        yield from rooted.scatter(peers, piece, [flat(part) for part in parts], root)


def all_to_all(peers: Peers, places: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
    """Copy rank s's part r to rank r's s-th place."""
    with contiguous(*places) as pieces:
        yield from direct.all_to_all(peers, pieces, [flat(part) for part in parts])
