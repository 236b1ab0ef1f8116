"""DDP has divided the gradients by the world size already, and they are divided by it once more."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
dist.init_process_group("gloo")
world_size = dist.get_world_size()

inputs = torch.randn(24, 4)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for batch, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), targets)
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= world_size  # (a)
    optimizer.step()

dist.destroy_process_group()
