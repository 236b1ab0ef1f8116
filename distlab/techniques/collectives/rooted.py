"""Rooted: rank 0 collects everyone's tensor, sums, and sends the sum back. The parameter server of the lessons.

Two rounds and 2(N-1) messages in total, the minimum, so it is the fastest for small tensors. But all bytes pass one
link: rank 0 receives (N-1)·S and sends as much, which grows with N, where the ring stays below 2·S.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), here with one server
and every worker in step.

Its four halves are collectives themselves, with any root: reduce, broadcast, gather, scatter.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from distlab.techniques.collectives.point_to_point import Peers, Steps, copy_own, split

SERVER = 0


def all_reduce(peers: Peers, tensor: Tensor, fold: Callable[..., Any] = torch.add) -> Steps:
    """Sum the flat `tensor` over all ranks, in place; or combine with `fold`, a function of two tensors with `out`."""
    yield from reduce(peers, tensor, SERVER, fold)
    yield from broadcast(peers, tensor, SERVER)


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
    flat = tensor.view(-1)
    if peers.rank != SERVER:
        yield from reduce(peers, flat, SERVER)
        yield from scatter(peers, output, (), SERVER)
        return
    with peers.scratch(flat.numel(), flat) as total:
        yield from reduce(peers, total.copy_(flat), SERVER)
        yield from scatter(peers, output, split(total.view_as(tensor), peers.world_size), SERVER)


def all_gather(peers: Peers, tensor: Tensor) -> Steps:
    """Fill `tensor`, in which every rank has written its own chunk."""
    chunks = split(tensor, peers.world_size)
    yield from gather(peers, chunks, chunks[peers.rank], SERVER)
    yield from broadcast(peers, tensor, SERVER)


def reduce(peers: Peers, tensor: Tensor, root: int, fold: Callable[..., Any] = torch.add) -> Steps:
    """Combine everyone's flat `tensor` in the root's: its own first, then the others in rank order."""
    tag = peers.new_tag()
    if peers.rank != root:
        yield from peers.post(tag, sends=[(root, tensor)])[1]
        return
    others = _others(peers, root)
    # A tensor is received while the previous one is added: two buffers suffice for any number of ranks.
    with peers.scratch(tensor.numel(), tensor) as even, peers.scratch(tensor.numel(), tensor) as odd:
        receives = list(zip(others, cycle((even, odd)), strict=False))
        arriving, _ = peers.post(tag, receives[:2])
        for turn, (_, place) in enumerate(receives):
            yield arriving[turn]
            fold(tensor, place, out=tensor)
            if turn + 2 < len(receives):
                arriving += peers.post(tag, [receives[turn + 2]])[0]


def broadcast(peers: Peers, tensor: Tensor, root: int) -> Steps:
    """Copy the root's `tensor` to everyone's."""
    if peers.rank == root:
        yield from peers.post(peers.new_tag(), sends=[(peer, tensor) for peer in _others(peers, root)])[1]
    else:
        yield from peers.post(peers.new_tag(), receives=[(root, tensor)])[0]


def gather(peers: Peers, places: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
    """Copy everyone's `tensor` to the root's `places`; no other rank needs them."""
    if peers.rank != root:
        yield from peers.post(peers.new_tag(), sends=[(root, tensor)])[1]
        return
    received, _ = peers.post(peers.new_tag(), receives=[(peer, places[peer]) for peer in _others(peers, root)])
    copy_own(tensor, places[root])
    yield from received


def scatter(peers: Peers, place: Tensor, tensors: Sequence[Tensor], root: int) -> Steps:
    """Copy the root's r-th tensor to rank r's `place`."""
    if peers.rank != root:
        yield from peers.post(peers.new_tag(), receives=[(root, place)])[0]
        return
    _, sent = peers.post(peers.new_tag(), sends=[(peer, tensors[peer]) for peer in _others(peers, root)])
    copy_own(tensors[root], place)
    yield from sent


def _others(peers: Peers, root: int) -> list[int]:
    return [peer for peer in range(peers.world_size) if peer != root]
