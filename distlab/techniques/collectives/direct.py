"""Direct: every rank sends each other rank its part at once, all receives posted first.

The bytes are the ring's, 2(N-1)/N·S for an all_reduce, in two rounds in place of 2(N-1); between two ranks in one: each
sends the other all of it, S, and both add. It needs a link between every two ranks and scratch memory of (N-1)/N·S, of
two ranks S. Where ranks share a switch or a machine nothing here is faster: on 4 ranks and two cores it is 2 to 3 times
as fast as gloo's reduce_scatter. Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
Operations in MPICH" (IJHPCA 2005), section 4.3, the pairwise exchange with all steps at once.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.techniques.collectives.point_to_point import Message, Peers, Steps, copy_own, split

# What is summed at a time: N parts of it stay in a core's cache. Smaller blocks cost a call (2 us) too often.
BLOCK_BYTES = 1 << 20

# A collective that has summed, and returns the sends that are still under way.
Summing = Generator[Message, None, list[Message]]


def all_reduce(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` over all ranks, in place."""
    if peers.world_size == 2:
        yield from _swap(peers, tensor)
        return
    chunks, tag = split(tensor, peers.world_size), peers.new_tag()
    # A peer's finished chunk comes only after it has received our part of that chunk, so its receive can lie in the
    # same place from the start: a rendezvous less, 20 to 40 % of the time below 4 MiB. NCCL would run the receives
    # first.
    early, _ = peers.post(tag, [] if peers.batched else _others(peers, chunks))
    parts_sent = yield from sum_own(peers, chunks, chunks[peers.rank])
    to_others = reversed(_others(peers, [chunks[peers.rank]] * peers.world_size))
    received, sent = peers.post(tag, _others(peers, chunks) if peers.batched else [], to_others)
    yield from (*parts_sent, *early, *received, *sent)


def _swap(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` of two ranks; a + b is b + a, to the bit.

    No message waits for another one, so that a slow link never idles: at 500 Mbit/s 64 MiB take 1111 ms, of which 1074
    are the link's own, and gloo's two rounds 1221 (LAB_NET_RATE=500mbit RUN_MODE=comm LAB_VARIANT=gloo,direct with 2
    ranks).
    """
    other = 1 - peers.rank
    with peers.scratch(tensor.numel(), tensor) as theirs:
        received, sent = peers.post(peers.new_tag(), [(other, theirs)], [(other, tensor)])
        yield from (*received, *sent)
        tensor.add_(theirs)


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself.

    The order of summation is fixed, whoever comes first: this rank's own part, then the others in the order of the
    ring.
    """
    sent = yield from sum_own(peers, split(tensor, peers.world_size), output)
    yield from sent


def all_gather(peers: Peers, tensor: Tensor) -> Steps:
    """Fill `tensor`, of which every rank holds its own chunk."""
    chunks = split(tensor, peers.world_size)
    return all_to_all(peers, chunks, [chunks[peers.rank]] * peers.world_size)


def all_to_all(peers: Peers, places: Sequence[Tensor], tensors: Sequence[Tensor]) -> Steps:
    """Lay rank s's r-th tensor in rank r's s-th place; its own place may be its own tensor."""
    receives, sends = _others(peers, places), reversed(_others(peers, tensors))
    received, sent = peers.post(peers.new_tag(), receives, sends)
    copy_own(tensors[peers.rank], places[peers.rank])
    yield from (*received, *sent)


def _others(peers: Peers, chunks: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """The other ranks' chunks. Each rank begins with another peer, so that no one is everyone's first; who is received
    from first is sent to last."""
    ring = [peers.after(-distance) for distance in range(1, peers.world_size)]
    return [(peer, chunks[peer]) for peer in ring]


def sum_own(peers: Peers, chunks: list[Tensor], output: Tensor, fold: Callable[..., Any] = torch.add) -> Summing:
    """Sum this rank's chunk of all ranks in `output`; their parts arrive in scratch memory."""
    others = _others(peers, chunks)
    with peers.scratch(output.numel() * len(others), output) as scratch:
        parts = [scratch[output.numel() * index :][: output.numel()] for index in range(len(others))]
        receives = [(peer, part) for (peer, _), part in zip(others, parts, strict=True)]
        received, sent = peers.post(peers.new_tag(), receives, reversed(others))
        yield from received
        add_up([chunks[peers.rank], *parts], output, fold)
    return sent


def add_up(parts: list[Tensor], output: Tensor, fold: Callable[..., Any] = torch.add) -> None:
    """output = parts[0] + parts[1] + ..., block by block; output may be parts[0]."""
    length = BLOCK_BYTES // output.element_size()
    for first in range(0, output.numel(), length):
        blocks = [part[first : first + length] for part in parts]
        total = output[first : first + length]
        fold(blocks[0], blocks[1], out=total)
        for block in blocks[2:]:
            fold(total, block, out=total)
