"""A ring all_reduce of sends and receives: torchrun --nproc-per-node 3 lesson.py"""

import torch
import torch.distributed as dist
from torch import Tensor


def pass_on(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send to the next rank and receive from the one before, both at once; returns the received tensor."""
    after, before = ((group.rank() + step) % group.size() for step in (1, -1))
    ends = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=after),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return incoming


def reduce_scatter(chunks: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of all ranks' chunk `rank`. Each of N-1 rounds moves one chunk: (N-1)/N of all bytes."""
    rank, ranks = group.rank(), group.size()
    total = chunks[rank - 1]
    for turn in range(ranks - 1):
        mine = chunks[(rank - 2 - turn) % ranks]
        total = pass_on(total, torch.empty_like(mine), group) + mine  # of turn + 2 ranks so far
    return total


def all_gather(chunks: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sends every rank's chunk `rank` to all others: in each round the chunk received in the last one."""
    rank, ranks = group.rank(), group.size()
    for turn in range(ranks - 1):  # one finished chunk per round
        pass_on(chunks[(rank - turn) % ranks], chunks[(rank - turn - 1) % ranks], group)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sums all ranks' `tensor` in place, equal to the bit on each: 2(N-1)/N of its bytes per rank, for any N.

    An all_reduce is the other two: a sum of each chunk on one rank, then copies of it.
    """
    chunks = list(tensor.tensor_split(group.size()))  # views, of any length
    chunks[group.rank()].copy_(reduce_scatter(chunks, group))
    all_gather(chunks, group)


def demo(group: dist.ProcessGroup) -> float:
    """Sum 11 numbers, which no N above 1 divides; return the largest error against a formula."""
    mine = torch.arange(11.0) * 10 ** group.rank()
    all_reduce(mine, group)
    return (mine - torch.arange(11.0) * sum(10**rank for rank in range(group.size()))).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: the sum differs from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
