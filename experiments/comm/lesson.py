"""A ring all_reduce of sends and receives: torchrun --nproc-per-node 3 lesson.py"""

import torch
import torch.distributed as dist
from torch import Tensor


def pass_on(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send to the next rank and receive from the one before, both at once; returns what came."""
    after, before = ((group.rank() + step) % group.size() for step in (1, -1))
    ends = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=after),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return incoming


def reduce_scatter(chunks: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' chunk `rank`. Each of N-1 rounds moves a chunk: (N-1)/N of all bytes."""
    rank, ranks = group.rank(), group.size()
    total = chunks[rank - 1]
    for turn in range(ranks - 1):
        mine = chunks[(rank - 2 - turn) % ranks]
        total = pass_on(total, torch.empty_like(mine), group) + mine  # of turn + 2 ranks by now
    return total


def all_gather(chunks: list[Tensor], group: dist.ProcessGroup) -> None:
    """Every rank's chunk `rank` to all, in the place of theirs: in each round the chunk that came in the last."""
    rank, ranks = group.rank(), group.size()
    for turn in range(ranks - 1):  # a finished chunk each
        pass_on(chunks[(rank - turn) % ranks], chunks[(rank - turn - 1) % ranks], group)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The sum of all ranks' `tensor`, in place, the same to the bit on each: 2(N-1)/N of its bytes a rank, for any N.

    An all_reduce is the other two: one sum of each chunk, then copies of it.
    """
    chunks = list(tensor.tensor_split(group.size()))  # views, of any length
    chunks[group.rank()].copy_(reduce_scatter(chunks, group))
    all_gather(chunks, group)


def demo(group: dist.ProcessGroup) -> float:
    """11 numbers, which no N from 2 on divides; how far their sum is from a formula's."""
    mine = torch.arange(11.0) * 10 ** group.rank()
    all_reduce(mine, group)
    return (mine - torch.arange(11.0) * sum(10**rank for rank in range(group.size()))).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: the sum differs from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
