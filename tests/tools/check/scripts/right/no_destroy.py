"""Training that ends without destroy_process_group: the process group goes with the process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)

for _ in range(4):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
    loss.backward()
    optimizer.step()

print(f"rank {rank}: last loss {loss.item():.4f}", flush=True)
