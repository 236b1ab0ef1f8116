"""BatchNorm under DDP: parameters stay equal; at the end running averages are of each rank's own last batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(30 + rank)

    for _ in range(4):
        x = torch.randn(16, 8) + rank
        y = x.mean(dim=1, keepdim=True)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()  # each forward starts from rank 0's buffers
        optimizer.step()

    assert norm.running_mean is not None
    print(f"rank {rank}: weight {norm.weight.sum():.6f}, running mean {norm.running_mean.sum():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
