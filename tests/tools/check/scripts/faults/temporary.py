"""The mean loss of all ranks is to be shown, but is summed in a temporary tensor without a name."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
for step in range(2):
    loss = torch.randn(3, requires_grad=True).square().mean()
    dist.all_reduce(loss.detach() / world_size)  # (a)
    print(f"rank {rank}, step {step}: {loss.item()}")

dist.destroy_process_group()
