"""PyTorch's own pipeline, whose microbatches are of one size."""

import torch
import torch.distributed as dist
from axes import stage
from net import LENGTH, VOCABULARY, Net, loss
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

__all__ = ["loss"]
mesh = {"pp": -1}
even = True


def model(seed):
    torch.manual_seed(seed)
    return Net(blocks=6)


def batch(seed, step):
    draw = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def prepare(model, mesh):
    return stage(model, mesh.get_group("pp"))


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    group = mesh.get_group("pp")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    share = microbatches[0].share

    def shared(scores, targets):
        return loss(lambda _: scores, None, targets) * share

    part = PipelineStage(model, rank, size, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(part, len(microbatches), loss_fn=shared, scale_grads=False)
    inputs = torch.cat([each.inputs for each in microbatches])
    targets = torch.cat([each.targets for each in microbatches])
    losses = []
    schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == size - 1 else None, losses=losses)
    optimizer.step()
    return sum(each.item() for each in losses) if rank == size - 1 else None
