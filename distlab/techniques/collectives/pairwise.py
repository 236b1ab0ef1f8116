"""Pair by pair: in every round each rank swaps with one other, block by block, until it has met them all.

The bytes are those of direct.py, 2(N-1)/N·S for an all_reduce. There N-1 parts come at once and a rank waits for all of
them; here one block comes, is added while it lies in the cache, and its place is used for the next one. The lower rank
of a pair sends first and the other once it has received: where ranks share cores half of them work while half wait, and
a reader is woken once a block. It takes a message a block, so it is for a transport on which a message costs little:
over gloo, pieces below 1 MiB cost more than they hide.

Who meets whom is a round-robin tournament by the circle method: N-1 rounds of N/2 pairs each, or N with one idle where
N is odd.
"""

from itertools import zip_longest

import torch
from torch import Tensor

from distlab.techniques.collectives.point_to_point import Peers, Steps, copy_own, split

BLOCK_BYTES = 1 << 20


def all_reduce(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` over all ranks, in place."""
    chunks = split(tensor, peers.world_size)
    yield from sum_own(peers, chunks, chunks[peers.rank])
    yield from share_own(peers, chunks)


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
    return sum_own(peers, split(tensor, peers.world_size), output)


def all_gather(peers: Peers, tensor: Tensor) -> Steps:
    """Fill `tensor`, of which every rank holds its own chunk."""
    return share_own(peers, split(tensor, peers.world_size))


def sum_own(peers: Peers, chunks: list[Tensor], output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` in `output`, added in the order in which this rank meets the others."""
    tag = peers.new_tag()
    copy_own(chunks[peers.rank], output)
    with peers.scratch(min(output.numel(), BLOCK_BYTES // output.element_size()), output) as scratch:
        for peer in opponents(peers.rank, peers.world_size):
            yield from _swap(peers, tag, peer, chunks[peer], output, scratch)


def share_own(peers: Peers, chunks: list[Tensor]) -> Steps:
    """Let everyone's chunk r be as rank r's."""
    tag = peers.new_tag()
    for peer in opponents(peers.rank, peers.world_size):
        yield from _swap(peers, tag, peer, chunks[peers.rank], chunks[peer])


def _swap(peers: Peers, tag: int, peer: int, give: Tensor, take: Tensor, scratch: Tensor | None = None) -> Steps:
    """Send `give`, and let what the peer gives come to `take`; with scratch memory for a block, add it."""
    sent = []
    for ours, theirs in zip_longest(_blocks(give), _blocks(take)):
        if ours is not None and peers.rank < peer:
            sent += peers.post(tag, sends=[(peer, ours)])[1]
        if theirs is not None:
            place = theirs if scratch is None else scratch[: theirs.numel()]
            yield from peers.post(tag, receives=[(peer, place)])[0]
            if scratch is not None:
                torch.add(theirs, place, out=theirs)
        if ours is not None and peers.rank > peer:
            sent += peers.post(tag, sends=[(peer, ours)])[1]
    yield from sent


def opponents(rank: int, world_size: int) -> list[int]:
    """Whom `rank` meets, round by round."""
    rounds = world_size - 1 + world_size % 2
    if rank == rounds:  # of an even number the last, who meets those whom the circle pairs with themselves
        return [turn * (rounds + 1) // 2 % rounds for turn in range(rounds)]
    met = [(turn - rank) % rounds for turn in range(rounds)]
    return [rounds if peer == rank else peer for peer in met if peer != rank or rounds < world_size]


def _blocks(chunk: Tensor) -> list[Tensor]:
    if chunk.nbytes <= BLOCK_BYTES:
        return [chunk] if chunk.numel() else []
    return list(chunk.split(BLOCK_BYTES // chunk.element_size()))
