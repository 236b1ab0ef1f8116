"""The other collectives straight from rank to rank: whoever has a part sends it to whoever is to have it.

One round and the fewest bytes, whatever the sizes: parts may differ in length. `reduced` is the exception, for
operations that are not a sum: to the root, which folds them in the order of ranks, and from it to all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from workers.parallel.peers import Peers, Steps

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
    """What folds two tensors into one; raises ValueError for an operation that has none here."""
    if op not in FOLDS:
        allowed = ", ".join(each.name for each in FOLDS)
        raise ValueError(f"{getattr(op, 'name', op)} is no operation over tcp, allowed: {allowed}")
    return FOLDS[op]


def broadcast(peers: Peers, tensor: Tensor, root: int) -> Steps:
    """Copy the root's `tensor` to everyone's."""
    others = [peer for peer in range(peers.world_size) if peer != root]
    if peers.rank == root:
        received, sent = peers.post(peers.new_tag(), sends=[(peer, tensor) for peer in others])
    else:
        received, sent = peers.post(peers.new_tag(), receives=[(root, tensor)])
    yield from (*received, *sent)


def gather(peers: Peers, places: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
    """Lay everyone's `tensor` in the root's `places`, which no one else has."""
    if peers.rank != root:
        _, sent = peers.post(peers.new_tag(), sends=[(root, tensor)])
        yield from sent
        return
    others = [(peer, place) for peer, place in enumerate(places) if peer != root]
    received, _ = peers.post(peers.new_tag(), receives=others)
    places[root].copy_(tensor)
    yield from received


def scatter(peers: Peers, place: Tensor, tensors: Sequence[Tensor], root: int) -> Steps:
    """Lay the root's r-th tensor in rank r's `place`."""
    if peers.rank != root:
        received, _ = peers.post(peers.new_tag(), receives=[(root, place)])
        yield from received
        return
    others = [(peer, tensor) for peer, tensor in enumerate(tensors) if peer != root]
    _, sent = peers.post(peers.new_tag(), sends=others)
    place.copy_(tensors[root])
    yield from sent


def all_gather(peers: Peers, places: Sequence[Tensor], tensor: Tensor) -> Steps:
    """Lay everyone's `tensor` in everyone's `places`; its own place may be the tensor itself."""
    return all_to_all(peers, places, [tensor] * peers.world_size)


def all_to_all(peers: Peers, places: Sequence[Tensor], tensors: Sequence[Tensor]) -> Steps:
    """Lay rank s's r-th tensor in rank r's s-th place."""
    others = [peers.after(distance) for distance in range(1, peers.world_size)]
    received, sent = peers.post(
        peers.new_tag(),
        [(peer, places[peer]) for peer in reversed(others)],
        [(peer, tensors[peer]) for peer in others],
    )
    if places[peers.rank].data_ptr() != tensors[peers.rank].data_ptr():
        places[peers.rank].copy_(tensors[peers.rank])
    yield from (*received, *sent)


def reduced(peers: Peers, tensor: Tensor, op: ReduceOp.RedOpType, root: int = 0) -> Steps:
    """Fold everyone's `tensor` into the root's, in the order of ranks; an average is left as its sum."""
    fold = fold_of(op)
    if peers.rank != root:
        _, sent = peers.post(peers.new_tag(), sends=[(root, tensor)])
        yield from sent
        return
    others = [peer for peer in range(peers.world_size) if peer != root]
    with peers.scratch(len(others) * tensor.numel(), tensor) as scratch:
        rows = scratch.view(len(others), tensor.numel())
        received, _ = peers.post(peers.new_tag(), receives=list(zip(others, rows, strict=True)))
        for message, row in zip(received, rows, strict=True):
            yield message
            fold(tensor, row, out=tensor)
