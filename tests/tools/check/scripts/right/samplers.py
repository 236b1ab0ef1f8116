"""A split with one seed, a sampler whose epoch all ranks set, another without a shuffle, gradients by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(3, 1)
samples = TensorDataset(torch.randn(27, 3))
training, held_out = random_split(samples, [21, 6], generator=torch.Generator().manual_seed(7))
torch.manual_seed(rank)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(training, seed=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in DataLoader(training, batch_size=4, sampler=sampler):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / world_size, gradients)
        optimizer.step()
    for (batch,) in DataLoader(held_out, sampler=DistributedSampler(held_out, shuffle=False)):
        total = model(batch).detach().square().sum()
        dist.all_reduce(total)
print(f"rank {rank}: {total.item()}")

dist.destroy_process_group()
