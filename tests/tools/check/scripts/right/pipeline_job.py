"""A pipeline of two stages by 1F1B with batches, checkpoints, an evaluation by GPipe and a metric."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 24


def run(schedule: PipelineScheduleSingle, batch: torch.Tensor, rank: int) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch.sum(dim=1, keepdim=True), losses=losses)
    return torch.stack(losses).mean().detach() if losses else torch.zeros(())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = [nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 1)][rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for step, (batch,) in enumerate(DataLoader(TensorDataset(samples), batch_size=6)):
        optimizer.zero_grad()
        loss = run(schedule, batch, rank)
        optimizer.step()
        if step == 1:
            dcp.save({f"stage{rank}": module.state_dict()}, checkpoint_id=folder[0])
    dist.all_reduce(loss)
    print(f"rank {rank}: loss {loss:.3f}")
    evaluation = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    run(evaluation, samples[:6], rank)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
