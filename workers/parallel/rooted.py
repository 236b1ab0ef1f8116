"""Rooted: rank 0 collects everyone's tensor, sums, and sends the sum back. The parameter server of the lessons.

Two rounds and 2(N-1) messages in all, the fewest there can be: so it is the fastest for small tensors. But all bytes
pass one link: rank 0 receives (N-1)·S and sends as much, a wall that grows with N where the ring's stays under 2·S.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), here with one server
and every worker in step.
"""

from torch import Tensor

from workers.parallel.peers import Peers, Steps, split

SERVER = 0


def all_reduce(peers: Peers, tensor: Tensor) -> Steps:
    """Sum the flat `tensor` over all ranks, in place."""
    yield from _reduce(peers, tensor)
    yield from _broadcast(peers, tensor)


def reduce_scatter(peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
    """Leave the sum of all ranks' chunk `rank` of `tensor` in `output`, which may be that chunk itself."""
    if peers.rank != SERVER:
        yield from _reduce(peers, tensor)
        received, _ = peers.post(peers.new_tag(), receives=[(SERVER, output)])
        yield from received
        return
    with peers.scratch(tensor.numel(), tensor) as scratch:
        total = scratch.view_as(tensor).copy_(tensor)
        yield from _reduce(peers, total)
        chunks = split(total, peers.world_size)
        _, sent = peers.post(peers.new_tag(), sends=[(worker, chunks[worker]) for worker in range(1, peers.world_size)])
        output.copy_(chunks[SERVER])
        yield from sent


def all_gather(peers: Peers, tensor: Tensor) -> Steps:
    """Fill `tensor`, of which every rank holds its own chunk."""
    tag, chunks = peers.new_tag(), split(tensor, peers.world_size)
    if peers.rank == SERVER:
        received, _ = peers.post(tag, receives=[(worker, chunks[worker]) for worker in range(1, peers.world_size)])
        yield from received
    else:
        _, sent = peers.post(tag, sends=[(SERVER, chunks[peers.rank])])
        yield from sent
    yield from _broadcast(peers, tensor)


def _reduce(peers: Peers, tensor: Tensor) -> Steps:
    """Add every worker's `tensor` to the server's, in the order of ranks."""
    tag, last, tensor = peers.new_tag(), peers.world_size - 1, tensor.view(-1)
    if peers.rank != SERVER:
        _, sent = peers.post(tag, sends=[(SERVER, tensor)])
        yield from sent
        return
    # One worker's tensor is received while the one before is added: two buffers, however many workers there are.
    with peers.scratch(tensor.numel(), tensor) as even, peers.scratch(tensor.numel(), tensor) as odd:
        buffers = [even, odd]
        arriving = [
            peers.post(tag, receives=[(worker, buffers[worker % 2])])[0] for worker in range(1, min(2, last) + 1)
        ]
        for worker in range(1, last + 1):
            yield from arriving[worker - 1]
            tensor.add_(buffers[worker % 2])
            if worker + 2 <= last:
                arriving.append(peers.post(tag, receives=[(worker + 2, buffers[worker % 2])])[0])


def _broadcast(peers: Peers, tensor: Tensor) -> Steps:
    """Copy the server's `tensor` to every worker."""
    if peers.rank == SERVER:
        received, sent = peers.post(peers.new_tag(), sends=[(worker, tensor) for worker in range(1, peers.world_size)])
    else:
        received, sent = peers.post(peers.new_tag(), receives=[(SERVER, tensor)])
    yield from received
    yield from sent
