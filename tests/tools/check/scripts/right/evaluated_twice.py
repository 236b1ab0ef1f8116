"""Two evaluations in a row see the same batches, as they should; gradients are divided before they are summed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    total = torch.zeros(1)
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.mse_loss(model(x), y)
    dist.all_reduce(total)
    return total.item()


def main() -> None:
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    held_out = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= world_size
                    dist.all_reduce(parameter.grad)
            optimizer.step()
    print(evaluate(model, held_out), evaluate(model, held_out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
