"""Two ways at once on a 2 x 2 mesh: tensor parallelism within a row, fully sharded data parallelism across."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.log_softmax(self.down(torch.relu(self.up(x))), dim=1)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize_module(MLP(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    replica = mesh["dp"].get_local_rank()
    data = torch.Generator().manual_seed(1 + replica)  # one batch per tensor-parallel group
    for step in range(3):
        x = torch.randn(16, 8, generator=data)
        y = torch.randint(4, (16,), generator=data)
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"rank {dist.get_rank()}, replica {replica}, step {step}: loss {loss.item():.4f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
