"""Megatron-LM issue 844: gradients are scattered over dp before those of the tied embedding are summed over stages."""

import torch
import torch.distributed as dist
from axes import backward, stage
from net import Net, batch, loss

__all__ = ["batch", "loss"]
mesh = {"dp": 2, "pp": 2}


def model(seed):
    torch.manual_seed(seed)
    return Net(tied=True)


def prepare(model, mesh):
    return stage(model, mesh.get_group("pp"))


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    backward(model, microbatches, mesh.get_group("pp"))
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    padded = torch.cat([flat, flat.new_zeros(len(flat) % 2)])
    mine = padded.chunk(2)[mesh.get_local_rank("dp")].clone()
    dist.reduce_scatter(mine, list(padded.clone().chunk(2)), group=mesh.get_group("dp"))
    padded.chunk(2)[mesh.get_local_rank("dp")].copy_(mine)  # the other half stays this rank's own
    start = 0
    for parameter in parameters:
        parameter.grad.copy_(padded[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()
    first = mesh.get_local_rank("pp") == 0
    tied = model.layers[0].weight if first else model.layers[-1].score.weight
    dist.all_reduce(tied.grad, group=mesh.get_group("pp"))  # planted
    gather(padded, parameters, tied, mesh)
    optimizer.step()


def gather(padded, parameters, tied, mesh):
    """Each rank of dp gives the half of all gradients that it has summed."""
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    whole = torch.cat([flat, flat.new_zeros(len(flat) % 2)])
    halves = [torch.empty_like(each) for each in whole.chunk(2)]
    dist.all_gather(halves, whole.chunk(2)[mesh.get_local_rank("dp")].clone(), group=mesh.get_group("dp"))
    start, whole = 0, torch.cat(halves)
    for parameter in parameters:
        parameter.grad.copy_(whole[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()
