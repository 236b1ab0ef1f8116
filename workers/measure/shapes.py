"""The operations of torch's c10d, and where in their arguments stands what a recorder asks for.

A kernel at BackendSelect sees every call just before its device's own kernel, whoever makes it, and passes it on with
the keys that are left (`BELOW`).
"""

from typing import NamedTuple

import torch

HERE = torch._C.DispatchKey.BackendSelect
BELOW = torch._C._dispatch_keyset_full_after(HERE)


class Shape(NamedTuple):
    """Where in a c10d operation's arguments stands what all ranks have to give alike; -1 for what it has not."""

    op: str
    compared: int  # the tensors
    group: int
    reduce: bool = False
    root: int = -1
    peer: int = -1


# The schemas are in torch/csrc/distributed/c10d/Ops.cpp.
SHAPES = {
    "allreduce_": Shape("all_reduce", 0, 1, reduce=True),
    "allreduce_coalesced_": Shape("all_reduce", 0, 1, reduce=True),
    "broadcast_": Shape("broadcast", 0, 1, root=2),
    "reduce_": Shape("reduce", 0, 1, reduce=True, root=3),
    "allgather_": Shape("all_gather", 1, 2),
    "_allgather_base_": Shape("all_gather", 1, 2),
    "allgather_coalesced_": Shape("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": Shape("all_gather", 1, 2),
    "reduce_scatter_": Shape("reduce_scatter", 0, 2, reduce=True),
    "_reduce_scatter_base_": Shape("reduce_scatter", 0, 2, reduce=True),
    "reduce_scatter_tensor_coalesced_": Shape("reduce_scatter", 0, 2, reduce=True),
    "scatter_": Shape("scatter", 0, 2, root=3),
    "gather_": Shape("gather", 1, 2, root=3),
    "alltoall_": Shape("all_to_all", 1, 2),
    "alltoall_base_": Shape("all_to_all", 1, 2),
    "barrier": Shape("barrier", -1, 1),
    "monitored_barrier_": Shape("monitored_barrier", -1, 1),
    "send": Shape("send", 0, 1, peer=2),
    "recv_": Shape("recv", 0, 1, peer=2),
    "recv_any_source_": Shape("recv", 0, 1),
}
