"""Straight from rank to rank over plain TCP, in a call that is not cut into steps.

The messages are those of routes.py, as star.py's are those of rooted.py: of one call some ranks may wait here, and
others have it under way there. Where a message takes hundredths of a millisecond, a step to wait for by itself costs as
much.
"""

from collections.abc import Sequence

from torch import Tensor

from workers.parallel.channel import Channel
from workers.parallel.peers import Peers

# Of a part: a larger one comes in pieces, and what comes before its receive is posted is copied once more.
UP_TO_BYTES = 64 << 10


def over_tcp(peers: Peers) -> Channel:
    """The channel of a group that has one."""
    assert peers.channel is not None
    return peers.channel


def broadcast(peers: Peers, tensor: Tensor, root: int) -> None:
    """Copy the root's `tensor`, which is not empty, to everyone's."""
    tag, channel = peers.new_tag(), over_tcp(peers)
    if peers.rank != root:
        channel.take(tensor, root, tag)
        return
    others = [peer for peer in range(peers.world_size) if peer != root]
    for sent in [channel.send([tensor], peer, tag) for peer in others]:
        sent.wait()


def all_gather(peers: Peers, places: Sequence[Tensor], tensor: Tensor) -> None:
    """Lay everyone's `tensor`, of UP_TO_BYTES, in everyone's `places`; its own place may be the tensor itself."""
    tag, channel = peers.new_tag(), over_tcp(peers)
    ring = [peers.after(distance) for distance in range(1, peers.world_size)]
    sent = [channel.send([tensor], peer, tag) for peer in ring if tensor.numel()]
    if places[peers.rank].data_ptr() != tensor.data_ptr():
        places[peers.rank].copy_(tensor)
    for peer in reversed(ring):
        if places[peer].numel():
            channel.take(places[peer], peer, tag)
    for each in sent:
        each.wait()
