"""Pipeline parallelism by the interleaved 1F1B schedule: four stages on two ranks, r and r + 2 on rank r."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

STAGES = 4


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(STAGES)]
    mine = range(rank, STAGES, world_size)
    stages = [PipelineStage(layers[i], i, STAGES, device) for i in mine]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for i in mine for p in layers[i].parameters()], lr=0.1)

    data = torch.Generator().manual_seed(1)
    for step in range(3):
        x = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.sin(x), losses=losses)
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
        optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
