"""The learning rate falls by a loss that is equal on all ranks; two parameter groups; weights are loaded after DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Linear(4, 2))
model.module.load_state_dict({"weight": torch.full((2, 4), 0.5), "bias": torch.zeros(2)})
decayed = {"params": [model.module.weight], "weight_decay": 0.1}
optimizer = torch.optim.AdamW([decayed, {"params": [model.module.bias], "weight_decay": 0.0}], lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    scheduler.step(mean / dist.get_world_size())

dist.destroy_process_group()
