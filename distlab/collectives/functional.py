"""The nine primitives as functions: a tensor in on every rank, a new tensor out, nothing changed in place.

Thin over `torch.distributed`, which writes into buffers that the caller lays out. "Rows" are tensors [N, ...] with a
row a rank. Ranks are those of the group. Where a rank gets nothing its result is an empty tensor of the same dtype.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives.by_hand import Collective


def send(x: Tensor, group: dist.ProcessGroup, source: int, destination: int) -> Tensor:
    """x of `source`, on `destination`; empty elsewhere. x has the same shape on both."""
    rank = group.rank()
    if rank == destination:
        if source != destination:
            x = torch.empty_like(x)
            group.recv([x], source, 0).wait()
        return x.clone()
    if rank == source:
        group.send([x.contiguous()], destination, 0).wait()
    return x.new_empty(0)


def broadcast(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """The root's x, on every rank. x has the same shape everywhere."""
    copy = x.clone()
    dist.broadcast(copy, group=group, group_src=root)
    return copy


def scatter(rows: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Row r of the root's `rows`, on rank r."""
    row = torch.empty_like(rows[0])
    dist.scatter(row, list(rows.unbind()) if group.rank() == root else None, group=group, group_src=root)
    return row


def gather(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """Everyone's x as rows, on the root; empty elsewhere."""
    rows = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == root else None
    dist.gather(x.contiguous(), rows, group=group, group_dst=root)
    return torch.stack(rows) if rows is not None else x.new_empty(0)


def reduce(x: Tensor, group: dist.ProcessGroup, root: int = 0) -> Tensor:
    """The sum of everyone's x, on the root; empty elsewhere."""
    total = x.clone()
    dist.reduce(total, group=group, group_dst=root)
    return total if group.rank() == root else x.new_empty(0)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Everyone's x as rows, on every rank."""
    rows = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(rows, x.contiguous(), group=group)
    return torch.stack(rows)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of everyone's x, on every rank."""
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row s is what rank s held as row r, on rank r: the transpose of rows and ranks."""
    received = [torch.empty_like(row) for row in rows]
    dist.all_to_all(received, [row.contiguous() for row in rows], group=group)
    return torch.stack(received)


def reduce_scatter(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of everyone's row r, on rank r."""
    row = torch.empty_like(rows[0])
    Collective(group).reduce_scatter(row, rows.contiguous())
    return row
