"""Before all ranks train, and between, rank 0 does alone what all do later: it trains in DDP, validates, splits."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def train_alone(group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen, _ = random_split(TensorDataset(torch.randn(10, 4)), [6, 4])
    for (inputs,) in DataLoader(seen, 2):
        optimizer.zero_grad()
        model(inputs).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    alone = dist.new_group([0])
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 4))
    if dist.get_rank() == 0:
        train_alone(alone)
    part, _ = random_split(data, [32, 16], generator=torch.Generator().manual_seed(0))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(part)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in DataLoader(part, 4, sampler=sampler):
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()
        if dist.get_rank() == 0:
            for _ in DataLoader(data, 6):
                pass
    dist.destroy_process_group()
