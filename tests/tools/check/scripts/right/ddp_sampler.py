"""DDP over a data set that a DistributedSampler divides, loaded by two workers per rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 10, generator=generator)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen, total = 0, 0.0
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            seen += len(inputs)
            total += loss.item() * len(inputs)
        print(f"rank {rank}, epoch {epoch}: {seen} samples, loss {total / seen:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
