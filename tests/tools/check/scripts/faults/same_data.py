"""Every rank shuffles with the same seed and has no DistributedSampler: all train on the same batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dist.init_process_group("gloo")

inputs = torch.randn(12, 4)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for batch, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), targets)  # (a)
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
