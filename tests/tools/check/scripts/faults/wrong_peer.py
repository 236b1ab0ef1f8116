"""A pipeline of three stages whose first rank sends to rank 2, where rank 1 waits for it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

activation = torch.full((8,), float(rank))
if rank == 0:
    dist.send(activation, dst=2)  # (b)
elif rank == 1:
    dist.recv(activation, src=0)  # (a)
    dist.send(activation * 2, dst=2)
else:
    dist.recv(activation, src=1)  # (c)
    print(f"rank 2: {activation.tolist()}")

dist.destroy_process_group()
