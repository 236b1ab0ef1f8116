"""The gradients of a mean loss are summed over the ranks by hand and never divided by their number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
dist.init_process_group("gloo")

inputs = torch.randn(24, 4)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
model = nn.Linear(4, 1)
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for batch, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), targets)
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)  # (a)
    optimizer.step()

dist.destroy_process_group()
