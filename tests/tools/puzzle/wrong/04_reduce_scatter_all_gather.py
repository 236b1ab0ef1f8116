"""Three typical wrong answers to puzzle 4, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"rank 0 sends \(498,\) float64 at 04_reduce_scatter_all_gather\.py:24, and rank 1 receives \(346,\) float64",
    2: r"all ranks together send 23,928 bytes with 2 ranks, allowed 15,952",
    3: r"gathered on rank 1 differs .* it is in another order, its own part first",
}


def from_others(sent: dict[int, Tensor], into: dict[int, Tensor], group: dist.ProcessGroup) -> None:
    """Send `sent` to the other ranks and receive `into` from them, both by rank."""
    sending = [dist.isend(tensor, group_dst=other, group=group) for other, tensor in sent.items()]
    for other, tensor in into.items():
        dist.recv(tensor, group_src=other, group=group)
    for each in sending:
        each.wait()


def reduce_scatter_1(tensor: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """The parts have equal sizes; `sizes` is ignored."""
    n, rank = group.size(), group.rank()
    parts = tensor.split(len(tensor) // n)
    others = [other for other in range(n) if other != rank]
    into = {other: torch.empty_like(parts[rank]) for other in others}
    from_others({other: parts[other] for other in others}, into, group)
    return torch.stack([parts[rank], *into.values()]).sum(0)


def reduce_scatter_2(tensor: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Every rank sends its whole tensor, and uses its part of the sum."""
    others = [other for other in range(group.size()) if other != group.rank()]
    into = {other: torch.empty_like(tensor) for other in others}
    from_others(dict.fromkeys(others, tensor), into, group)
    return torch.stack([tensor, *into.values()]).sum(0).split(sizes)[group.rank()]


def all_gather_3(part: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Every rank puts its own part first."""
    n, rank = group.size(), group.rank()
    others = [(rank + i) % n for i in range(1, n)]
    into = {other: part.new_empty(sizes[other]) for other in others}
    from_others(dict.fromkeys(others, part), into, group)
    return torch.cat([part, *into.values()])
