"""The tree: recursive halving, then recursive doubling, log2 N rounds each way in place of the ring's N-1.

This is Rabenseifner's algorithm, which pairs ranks like the levels of a tree. NCCL uses the name for another one: two
binary trees, each of which reduces half of the tensor up and broadcasts it down (Sanders, Speck, Träff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009).

In a reduce_scatter ranks at distance P/2 exchange halves and add, then quarters at distance P/4, and so on; an
all_gather is the reverse. P is the largest power of two within N; rank P+i first folds its tensor into rank i, and gets
the result from it at the end, which costs these pairs S more each way. Source: Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH" (IJHPCA 2005), sections 4.4 and 4.5.
"""

from itertools import accumulate

import torch
from torch import Tensor

from distlab.techniques.collectives.point_to_point import Peers, Steps, split


class Core:
    """The flat `tensor` for the P ranks of the core: rank r owns the elements of the r-th width."""

    def __init__(self, peers: Peers, tensor: Tensor, widths: list[int]) -> None:
        self.peers, self.tensor, self.size = peers, tensor, len(widths)
        self.bounds = list(accumulate(widths, initial=0))
        self.inside = peers.rank < self.size

    def block(self, rank: int, width: int) -> Tensor:
        """Return the elements that the aligned block of `width` core ranks around `rank` owns."""
        first = rank // width * width
        return self.tensor[self.bounds[first] : self.bounds[first + width]]

    def fold(self) -> Steps:
        """Add rank P+i's tensor to rank i's."""
        rank, tag = self.peers.rank, self.peers.new_tag()
        if not self.inside:
            _, sent = self.peers.post(tag, sends=[(rank - self.size, self.tensor)])
            yield from sent
        elif rank + self.size < self.peers.world_size:
            with self.peers.scratch(self.tensor.numel(), self.tensor) as incoming:
                received, _ = self.peers.post(tag, receives=[(rank + self.size, incoming)])
                yield from received
                self.tensor.add_(incoming)

    def halve(self) -> Steps:
        """Leave each rank of the core with the sum of its own block."""
        rank, tag, width = self.peers.rank, self.peers.new_tag(), self.size // 2
        while width and self.inside:
            kept, outgoing = self.block(rank, width), self.block(rank ^ width, width)
            with self.peers.scratch(kept.numel(), kept) as incoming:
                received, sent = self.peers.post(tag, [(rank ^ width, incoming)], [(rank ^ width, outgoing)])
                yield from received
                kept.add_(incoming)
                yield from sent
            width //= 2

    def double(self) -> Steps:
        """Give every rank of the core the blocks of all."""
        rank, tag, width = self.peers.rank, self.peers.new_tag(), 1
        while width < self.size and self.inside:
            outgoing, incoming = self.block(rank, width), self.block(rank ^ width, width)
            received, sent = self.peers.post(tag, [(rank ^ width, incoming)], [(rank ^ width, outgoing)])
            yield from received
            yield from sent
            width *= 2

    def swap(self, *, inward: bool, outer: Tensor, inner: Tensor) -> Steps:
        """Move a tensor between each pair of rank i and rank P+i: `outer` is P+i's end of it, `inner` is i's."""
        rank, tag = self.peers.rank, self.peers.new_tag()
        if self.inside and rank + self.size >= self.peers.world_size:
            return
        peer, end = (rank + self.size, inner) if self.inside else (rank - self.size, outer)
        receiving = self.inside == inward
        received, sent = self.peers.post(tag, [(peer, end)] if receiving else [], [] if receiving else [(peer, end)])
        yield from received
        yield from sent


def all_reduce(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` over all ranks, in place."""
    core = Core(peers, tensor, [chunk.numel() for chunk in split(tensor, core_size(peers.world_size))])
    yield from core.fold()
    yield from core.halve()
    yield from core.double()
    yield from core.swap(inward=False, outer=tensor, inner=tensor)


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
    chunks = split(tensor, peers.world_size)
    with peers.scratch(tensor.numel(), tensor) as paired:
        core, places = _paired(peers, paired, chunks)
        torch.cat([chunks[rank] for rank in places], out=paired)
        yield from core.fold()
        yield from core.halve()
        peer = peers.rank + core.size
        yield from core.swap(inward=False, outer=output, inner=places.get(peer, output))
        if core.inside:
            output.copy_(places[peers.rank])


def all_gather(peers: Peers, tensor: Tensor) -> Steps:
    """Fill `tensor`, in which every rank has written its own chunk."""
    chunks = split(tensor, peers.world_size)
    with peers.scratch(tensor.numel(), tensor) as paired:
        core, places = _paired(peers, paired, chunks)
        mine = places[peers.rank].copy_(chunks[peers.rank])
        yield from core.swap(inward=True, outer=mine, inner=places.get(peers.rank + core.size, mine))
        yield from core.double()
        yield from core.swap(inward=False, outer=paired, inner=paired)
        for rank, place in places.items():
            chunks[rank].copy_(place)


def core_size(world_size: int) -> int:
    """Return P, the largest power of two that is at most N."""
    return 1 << (world_size.bit_length() - 1)


def _paired(peers: Peers, paired: Tensor, chunks: list[Tensor]) -> tuple[Core, dict[int, Tensor]]:
    """Put the chunks of ranks i and P+i side by side, since rank i represents both; return the core and their
    places."""
    size = core_size(peers.world_size)
    pairs = [[rank for rank in (index, index + size) if rank < peers.world_size] for index in range(size)]
    order = [rank for pair in pairs for rank in pair]
    places = dict(zip(order, paired.split([chunks[rank].numel() for rank in order]), strict=True))
    return Core(peers, paired, [sum(chunks[rank].numel() for rank in pair) for pair in pairs]), places
