"""Direct, block by block: a block is added while it is in the cache, and its sum leaves while the next one comes.

The bytes are those of direct.py, 2(N-1)/N·S for an all_reduce. There a rank waits for all parts of its chunk before it
adds the first two, and holds (N-1)/N·S of them; here it holds two blocks of each peer. It takes a message a block, so
it is for a transport on which a message costs little: over gloo, pieces below 1 MiB cost more than they hide.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.parallel.direct import all_gather
from workers.parallel.peers import Message, Peers, Steps, split

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]

BLOCK_BYTES = 1 << 20


def all_reduce(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` over all ranks, in place."""
    chunks = split(tensor, peers.world_size)
    parts, sums = peers.new_tag(), peers.new_tag()
    sent = _parts(peers, parts, chunks)
    # A sum comes when its owner has our part of it, so its place is free by then.
    arriving = [
        message
        for peer in _order(peers)
        for block in _blocks(chunks[peer])
        for message in peers.post(sums, receives=[(peer, block)])[0]
    ]
    for block in _summed(peers, parts, chunks[peers.rank], chunks[peers.rank]):
        if isinstance(block, Message):
            yield block
        else:
            sent += peers.post(sums, sends=[(peer, block) for peer in _order(peers)])[1]
    yield from (*arriving, *sent)


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
    chunks, parts = split(tensor, peers.world_size), peers.new_tag()
    sent = _parts(peers, parts, chunks)
    for block in _summed(peers, parts, chunks[peers.rank], output):
        if isinstance(block, Message):
            yield block
    yield from sent


def _parts(peers: Peers, tag: int, chunks: list[Tensor]) -> list[Message]:
    """Begin to send each other rank this rank's part of its chunk, the first blocks of all of them first."""
    rounds = zip_blocks([(peer, chunks[peer]) for peer in _order(peers)])
    return [message for round_ in rounds for message in peers.post(tag, sends=round_)[1]]


def zip_blocks(chunks: list[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """The first blocks of all chunks, then the second ones."""
    cut = [[(peer, block) for block in _blocks(chunk)] for peer, chunk in chunks]
    for index in range(max(map(len, cut), default=0)):
        yield [blocks[index] for blocks in cut if index < len(blocks)]


def _summed(peers: Peers, tag: int, mine: Tensor, output: Tensor) -> Iterator[Message | Tensor]:
    """The blocks of `output` as they are summed, in a fixed order of ranks, and before each what has to be awaited."""
    blocks, order = _blocks(mine), _order(peers)
    length = blocks[0].numel() if blocks else 0
    with peers.scratch(2 * len(order) * length, mine) as scratch:
        places = list(scratch.view(2, len(order), length).unbind()) if length else []

        def awaited(index: int) -> list[Message]:
            place = places[index % 2]
            receives = [(peer, place[row, : blocks[index].numel()]) for row, peer in enumerate(order)]
            return peers.post(tag, receives)[0]

        coming = [awaited(index) for index in range(min(2, len(blocks)))]
        for index, (block, total) in enumerate(zip(blocks, _blocks(output), strict=True)):
            for row, message in enumerate(coming[index]):
                yield message
                torch.add(total if row else block, places[index % 2][row, : block.numel()], out=total)
            if index + 2 < len(blocks):
                coming.append(awaited(index + 2))
            yield total


def _order(peers: Peers) -> list[int]:
    """The other ranks, from the next one around the ring."""
    return [peers.after(distance) for distance in range(1, peers.world_size)]


def _blocks(chunk: Tensor) -> list[Tensor]:
    return list(chunk.split(BLOCK_BYTES // chunk.element_size())) if chunk.numel() else []
