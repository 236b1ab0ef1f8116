"""Gradients are averaged in the order in which each rank has used the layers; two layers have one shape."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
router = nn.Linear(4, 4)
optimizer = torch.optim.SGD([*router.parameters(), *experts.parameters()], lr=0.1)

torch.manual_seed(1 + rank)
for step in range(3):
    used = [experts[0], experts[1]] if step != 1 or rank == 0 else [experts[1], experts[0]]
    outputs = router(torch.randn(8, 4))
    for expert in used:
        outputs = torch.tanh(expert(outputs))
    optimizer.zero_grad()
    outputs.square().mean().backward()
    for layer in (router, *used):
        for parameter in layer.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # (a)
                parameter.grad /= dist.get_world_size()
    optimizer.step()

dist.destroy_process_group()
