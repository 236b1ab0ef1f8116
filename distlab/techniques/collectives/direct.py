"""Direct: every rank sends its parts to all other ranks at once; all receives are posted first.

The bytes are those of the ring, 2(N-1)/N·S for an all_reduce, in 2 rounds instead of 2(N-1). Two ranks need only one:
each sends the other all of it, S, and both add. It needs a link between every two ranks and scratch memory of
(N-1)/N·S, with two ranks S. Where ranks share a switch or a machine it is the fastest one here: on 4 ranks and two
cores 2 to 3 times as fast as gloo's reduce_scatter. Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH" (IJHPCA 2005), section 4.3, the pairwise exchange with all steps at once.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.techniques.collectives.point_to_point import Message, Peers, Steps, copy_own, split

# Size of the blocks that are summed: N of them stay in a core's cache. Smaller ones pay a call (2 us) too often.
BLOCK_BYTES = 1 << 20

# A collective that has computed its sum, and returns the sends that are still running.
Summing = Generator[Message, None, list[Message]]


def all_reduce(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` over all ranks, in place."""
    if peers.world_size == 2:
        yield from _swap(peers, tensor)
        return
    chunks, tag = split(tensor, peers.world_size), peers.new_tag()
    # A peer's finished chunk arrives only after that peer has received our part of it, so its receive can be posted in
    # the same memory from the start: one rendezvous less, 20 to 40 % of the time below 4 MiB. NCCL would run the
    # receives first.
    early, _ = peers.post(tag, [] if peers.batched else _others(peers, chunks))
    parts_sent = yield from sum_own(peers, chunks, chunks[peers.rank])
    to_others = reversed(_others(peers, [chunks[peers.rank]] * peers.world_size))
    received, sent = peers.post(tag, _others(peers, chunks) if peers.batched else [], to_others)
    yield from (*parts_sent, *early, *received, *sent)


def _swap(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` of two ranks; a + b equals b + a, to the bit.

    No message waits for another, so a slow link is never idle: at 500 Mbit/s 64 MiB take 1111 ms, 1074 of them on the
    link, and with gloo's two rounds 1221 ms (LAB_NET_RATE=500mbit RUN_MODE=comm LAB_VARIANT=gloo,direct with 2 ranks).
    """
    other = 1 - peers.rank
    with peers.scratch(tensor.numel(), tensor) as received_tensor:
        received, sent = peers.post(peers.new_tag(), [(other, received_tensor)], [(other, tensor)])
        yield from (*received, *sent)
        tensor.add_(received_tensor)


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself.

    The order of summation does not depend on arrival: this rank's own part first, then the others in ring order.
    """
    sent = yield from sum_own(peers, split(tensor, peers.world_size), output)
    yield from sent


def all_gather(peers: Peers, tensor: Tensor) -> Steps:
    """Fill `tensor`, in which every rank has written its own chunk."""
    chunks = split(tensor, peers.world_size)
    return all_to_all(peers, chunks, [chunks[peers.rank]] * peers.world_size)


def all_to_all(peers: Peers, places: Sequence[Tensor], tensors: Sequence[Tensor]) -> Steps:
    """Copy rank s's r-th tensor to rank r's s-th place; its own place may be its own tensor."""
    receives, sends = _others(peers, places), reversed(_others(peers, tensors))
    received, sent = peers.post(peers.new_tag(), receives, sends)
    copy_own(tensors[peers.rank], places[peers.rank])
    yield from (*received, *sent)


def _others(peers: Peers, chunks: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the other ranks' chunks, starting at a different peer on each rank, so that no rank is everyone's first;
    sends use the reverse order of receives."""
    ring = [peers.after(-distance) for distance in range(1, peers.world_size)]
    return [(peer, chunks[peer]) for peer in ring]


def sum_own(peers: Peers, chunks: list[Tensor], output: Tensor, fold: Callable[..., Any] = torch.add) -> Summing:
    """Write the sum of this rank's chunk of all ranks to `output`; their parts arrive in scratch memory."""
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
