"""Only rank 0 steps the scheduler, where it logs; the others keep their learning rate."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
decayed = {"params": [model.module.weight], "weight_decay": 0.1}
optimizer = torch.optim.AdamW([decayed, {"params": [model.module.bias], "weight_decay": 0.0}], lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

torch.manual_seed(1 + rank)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()  # (a)
    if rank == 0 and step >= 1:
        scheduler.step()
        print(f"step {step}: lr {scheduler.get_last_lr()}")

dist.destroy_process_group()
