"""Small tensors by the fewest messages, to rank 0 and back, in a call that is not cut into steps.

They are rooted.py's, message for message. There each step can be waited for by the caller, which costs rank 0
some 30 us of Python a call: nothing where gloo takes milliseconds, and seen where the messages take tenths of one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workers.parallel.peers import Peers, split
from workers.parallel.straight import over_tcp

ROOT = 0


def all_reduce(peers: Peers, tensor: Tensor, fold: Callable[..., Any] = torch.add) -> None:
    """Fold everyone's flat `tensor` into one, in the order of ranks, in place."""
    # Tags as of routes.py in turn: of one sum some ranks may wait for it here, and others have it under way there.
    there, back, channel = peers.new_tag(), peers.new_tag(), over_tcp(peers)
    if peers.rank != ROOT:
        channel.send([tensor], ROOT, there)
        channel.take(tensor, ROOT, back)
        return
    with peers.scratch(tensor.numel(), tensor) as theirs:
        for peer in range(1, peers.world_size):
            channel.take(theirs, peer, there)
            fold(tensor, theirs, out=tensor)
    for sent in [channel.send([tensor], peer, back) for peer in range(1, peers.world_size)]:
        sent.wait()


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> None:
    """Leave the sum of all ranks' chunk `rank` of `tensor`, of which none is empty, in `output`."""
    there, back, channel = peers.new_tag(), peers.new_tag(), over_tcp(peers)
    if peers.rank != ROOT:
        channel.send([tensor], ROOT, there)
        channel.take(output, ROOT, back)
        return
    with peers.scratch(2 * tensor.numel(), tensor) as scratch:
        total, theirs = (half.view_as(tensor) for half in scratch.view(2, -1))
        first = tensor
        for peer in range(1, peers.world_size):
            channel.take(theirs, peer, there)
            torch.add(first, theirs, out=total)
            first = total
        chunks = split(total, peers.world_size)
        sent = [channel.send([chunks[peer]], peer, back) for peer in range(1, peers.world_size)]
        output.copy_(chunks[ROOT])
        for each in sent:
            each.wait()


def all_gather(peers: Peers, tensor: Tensor) -> None:
    """Fill `tensor`, of which every rank holds its own chunk, and none is empty."""
    there, back, channel = peers.new_tag(), peers.new_tag(), over_tcp(peers)
    chunks = split(tensor, peers.world_size)
    if peers.rank != ROOT:
        channel.send([chunks[peers.rank]], ROOT, there).wait()
        channel.take(tensor, ROOT, back)
        return
    for peer in range(1, peers.world_size):
        channel.take(chunks[peer], peer, there)
    for sent in [channel.send([tensor], peer, back) for peer in range(1, peers.world_size)]:
        sent.wait()
