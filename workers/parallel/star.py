"""Small tensors by the fewest messages, to rank 0 and back, in a call that is not cut into steps.

They are rooted.py's, message for message. There each step can be waited for by the caller, which costs rank 0
some 30 us of Python a call: nothing where gloo takes milliseconds, and seen where the messages take tenths of one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workers.parallel.peers import Peers, split

ROOT = 0


def all_reduce(peers: Peers, tensor: Tensor, fold: Callable[..., Any] = torch.add) -> None:
    """Fold everyone's flat `tensor` into one, in the order of ranks, in place."""
    # Tags as of routes.py in turn: of one sum some ranks may wait for it here, and others have it under way there.
    there, back, carrier = peers.new_tag(), peers.new_tag(), peers.carrier
    if peers.rank != ROOT:
        carrier.send([tensor], ROOT, there)
        carrier.recv([tensor], ROOT, back).wait()
        return
    with peers.scratch(tensor.numel(), tensor) as theirs:
        for peer in range(1, peers.world_size):
            carrier.recv([theirs], peer, there).wait()
            fold(tensor, theirs, out=tensor)
    for sent in [carrier.send([tensor], peer, back) for peer in range(1, peers.world_size)]:
        sent.wait()


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> None:
    """Leave the sum of all ranks' chunk `rank` of `tensor`, of which none is empty, in `output`."""
    there, back, carrier = peers.new_tag(), peers.new_tag(), peers.carrier
    if peers.rank != ROOT:
        carrier.send([tensor], ROOT, there)
        carrier.recv([output], ROOT, back).wait()
        return
    with peers.scratch(2 * tensor.numel(), tensor) as scratch:
        total, theirs = (half.view_as(tensor) for half in scratch.view(2, -1))
        first = tensor
        for peer in range(1, peers.world_size):
            carrier.recv([theirs], peer, there).wait()
            torch.add(first, theirs, out=total)
            first = total
        chunks = split(total, peers.world_size)
        sent = [carrier.send([chunks[peer]], peer, back) for peer in range(1, peers.world_size)]
        output.copy_(chunks[ROOT])
        for each in sent:
            each.wait()


def all_gather(peers: Peers, tensor: Tensor) -> None:
    """Fill `tensor`, of which every rank holds its own chunk, and none is empty."""
    there, back, carrier = peers.new_tag(), peers.new_tag(), peers.carrier
    chunks = split(tensor, peers.world_size)
    if peers.rank != ROOT:
        carrier.send([chunks[peers.rank]], ROOT, there).wait()
        carrier.recv([tensor], ROOT, back).wait()
        return
    for peer in range(1, peers.world_size):
        carrier.recv([chunks[peer]], peer, there).wait()
    for sent in [carrier.send([tensor], peer, back) for peer in range(1, peers.world_size)]:
        sent.wait()
