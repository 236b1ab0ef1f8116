"""Tensor parallelism by hand whose ranks clip their halves of the gradients by their own norms."""

import torch
import torch.distributed as dist
from torch import nn


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(_, partial):  # type: ignore[no-untyped-def]
        whole = partial.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(_, gradient):  # type: ignore[no-untyped-def]
        return gradient


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Linear(6, 8 // dist.get_world_size())
        self.rows = nn.Linear(8 // dist.get_world_size(), 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Summed.apply(self.rows(torch.relu(self.columns(x))))  # type: ignore[no-untyped-call]
        return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.Generator().manual_seed(7)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=samples)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # (a)
        optimizer.step()
    dist.destroy_process_group()
