"""Gradients are sharded by a reduce_scatter, and each rank clips its part by that part's own norm."""

import torch
import torch.distributed as dist
from torch import nn

if __name__ == "__main__":
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(7, 2)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    shard = nn.Parameter(flat.chunk(size)[dist.get_rank()].clone())
    shard.grad = torch.zeros_like(shard)
    optimizer = torch.optim.SGD([shard], lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(6, 7)).square().mean().backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        dist.reduce_scatter_tensor(shard.grad, gradient / size)
        nn.utils.clip_grad_norm_([shard], 0.1)  # (a)
        optimizer.step()
        dist.all_gather_into_tensor(flat, shard.detach())
        nn.utils.vector_to_parameters(flat, model.parameters())
    dist.destroy_process_group()
