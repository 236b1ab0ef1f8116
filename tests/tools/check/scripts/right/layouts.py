"""Views of all kinds in calls that allow them: gathered columns, a matrix that is transposed on all ranks, halves of a
buffer whose other half is written before the wait, a NumPy array that is read again after it."""

import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
table = torch.arange(12.0).reshape(4, 3) + rank
parts = [torch.empty(4) for _ in range(world_size)]
dist.all_gather(parts, table[:, 1])
assert parts[1].tolist() == [2.0, 5.0, 8.0, 11.0]
turned = table.t()
dist.all_reduce(turned)
assert turned[0, 1] == table[1, 0]
column = table[:, 2].contiguous()
dist.broadcast(column, src=0)
table[:, 2] = column

buffer = torch.full((2, 500), float(rank + 1))
handle = dist.all_reduce(buffer[0], async_op=True)
buffer[1].mul_(0.5)
handle.wait()
assert buffer[0, 0] == sum(range(1, world_size + 1))
counts = np.full(1000, 1.0 / (rank + 3), dtype=np.float32)
handle = dist.all_reduce(torch.from_numpy(counts), async_op=True)
handle.wait()
counts /= world_size
for _ in range(20):  # gloo divides in a thread of its own, before the wait or after
    average = torch.full((1000,), float(rank))
    handle = dist.all_reduce(average, op=dist.ReduceOp.AVG, async_op=True)
    assert handle is not None
    handle.wait()
peer = 1 - rank
sent, received = dist.isend(buffer[0], peer), dist.irecv(buffer[1], peer)
assert sent is not None and received is not None
received.wait()
buffer[1].zero_()
sent.wait()
buffer[0].zero_()
whole = torch.full((2, 8), float(rank))
handle = dist.all_gather_into_tensor(whole, whole[rank : rank + 1], async_op=True)
handle.wait()
assert whole[:, 0].tolist() == [0.0, 1.0]

dist.destroy_process_group()
