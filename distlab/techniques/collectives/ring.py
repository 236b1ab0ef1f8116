"""The ring: every rank talks only to its two neighbours, and each link carries the same bytes in every round.

N-1 rounds of send-and-add leave each rank with one finished chunk (reduce_scatter), N-1 more rounds pass the finished
chunks on (all_gather). A rank sends (N-1)/N·S in each half, 2(N-1)/N·S in total: less than 2·S for every N, but in
2(N-1) rounds, each of which costs a latency. Source: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations" (JPDC 2009), section 3.
"""

import torch
from torch import Tensor

from distlab.techniques.collectives.point_to_point import Peers, Steps, split


def all_reduce(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` over all ranks, in place."""
    chunks = split(tensor, peers.world_size)
    # In the lessons rank r first sends chunk r, and so ends with the sum of chunk r + 1.
    chunks = chunks[1:] + chunks[:1]
    yield from _reduce_scatter(peers, chunks, chunks[peers.rank])
    yield from _all_gather(peers, chunks)


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
    return _reduce_scatter(peers, split(tensor, peers.world_size), output)


def all_gather(peers: Peers, tensor: Tensor) -> Steps:
    """Fill `tensor`, in which every rank has written its own chunk."""
    return _all_gather(peers, split(tensor, peers.world_size))


def _reduce_scatter(peers: Peers, chunks: list[Tensor], output: Tensor) -> Steps:
    """In round k rank r passes on the partial sum of chunk r-1-k and adds its own part to the one of chunk r-2-k."""
    tag, numel = peers.new_tag(), max(chunk.numel() for chunk in chunks)
    with peers.scratch(numel, output) as even, peers.scratch(numel, output) as odd:
        outgoing = chunks[peers.after(-1)]
        for turn in range(peers.world_size - 1):
            part = chunks[peers.after(-2 - turn)]
            incoming = (odd if turn % 2 else even)[: part.numel()]
            received, sent = peers.post(tag, [(peers.after(-1), incoming)], [(peers.after(1), outgoing)])
            yield from received
            last = turn == peers.world_size - 2
            torch.add(incoming, part, out=output if last else incoming)
            yield from sent
            outgoing = incoming


def _all_gather(peers: Peers, chunks: list[Tensor]) -> Steps:
    """In round k rank r passes on chunk r-k, its own first, and receives chunk r-1-k."""
    tag = peers.new_tag()
    for turn in range(peers.world_size - 1):
        incoming, outgoing = chunks[peers.after(-1 - turn)], chunks[peers.after(-turn)]
        received, sent = peers.post(tag, [(peers.after(-1), incoming)], [(peers.after(1), outgoing)])
        yield from received
        yield from sent
