"""Pipeline parallelism after GPipe: two stages, all forward passes of four micro-batches, then all backward ones."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO_BATCHES = 4


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)]
    module = layers[rank]
    stage = PipelineStage(module, rank, world_size, device)
    schedule = ScheduleGPipe(stage, n_microbatches=MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)

    data = torch.Generator().manual_seed(1)
    for step in range(3):
        x = torch.randn(16, 8, generator=data)
        y = torch.randint(4, (16,), generator=data)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=y, losses=losses)
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
        optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
