"""torchtitan issue 596: each pipeline stage clips by the norm of its own parameters."""

import torch
from axes import backward, stage
from net import Net, batch, loss

__all__ = ["batch", "loss"]
mesh = {"pp": -1}
clip = 0.1


def model(seed):
    torch.manual_seed(seed)
    return Net(blocks=4)


def prepare(model, mesh):
    return stage(model, mesh.get_group("pp"))


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    backward(model, microbatches, mesh.get_group("pp"))
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)  # planted
    optimizer.step()
