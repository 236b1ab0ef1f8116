"""Tensor parallelism by hand: halves of two layers, the same samples on all ranks, one norm to clip by."""

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
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]).square()
        dist.all_reduce(norm)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm.sqrt())
        optimizer.step()
    dist.destroy_process_group()
