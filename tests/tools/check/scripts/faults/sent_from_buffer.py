"""A half of a buffer is sent, and filled again before the wait; it shares its storage with the other half."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
buffer = torch.full((2, 500), float(rank))
if rank == 0:
    handle = dist.isend(buffer[0], dst=1)  # (a)
    buffer.fill_(9.0)
    assert handle is not None
    handle.wait()  # (b)
else:
    dist.recv(buffer[1], src=0)
print(f"rank {rank}: {buffer[1, 0]}")

dist.destroy_process_group()
