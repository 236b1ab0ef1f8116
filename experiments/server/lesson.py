"""A parameter server in step with its workers: torchrun --nproc-per-node 3 lesson.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SERVER = 0  # also a worker


def push(count: Tensor, gradients: Tensor, group: dist.ProcessGroup) -> None:
    """Sends each worker's sum of gradients [P] and its number of terms; the server then has the mean over all.

    A worker sends S bytes. The server receives (N-1)·S, which grows with N: its link is the limit.
    """
    if group.rank() != SERVER:
        dist.send(count, group=group, group_dst=SERVER)
        dist.send(gradients, group=group, group_dst=SERVER)
        return
    their_count, their_gradients = torch.empty_like(count), torch.empty_like(gradients)
    for worker in range(1, group.size()):  # in the order of ranks: a sum of floats depends on it
        dist.recv(their_count, group=group, group_src=worker)
        dist.recv(their_gradients, group=group, group_src=worker)
        count += their_count
        gradients += their_gradients
    gradients /= count  # divide once: a mean of means would overweight a small shard's samples


def fetch(weights: Tensor, group: dist.ProcessGroup) -> None:
    """Sends the server's weights [P] to all workers: (N-1)·S bytes from one rank."""
    if group.rank() != SERVER:
        dist.recv(weights, group=group, group_src=SERVER)
        return
    for worker in range(1, group.size()):
        dist.send(weights, group=group, group_dst=worker)


def step(model: nn.Module, inputs: Tensor, targets: Tensor, lr: float, group: dist.ProcessGroup) -> None:
    """Takes one step of all: only the server has an optimizer."""
    model.zero_grad()
    (model(inputs) - targets).square().sum().backward()  # the sum over this worker's samples
    gradients = parameters_to_vector(parameter.grad for parameter in model.parameters())
    weights = parameters_to_vector(model.parameters()).detach()
    push(torch.tensor([targets.numel()]), gradients, group)
    if group.rank() == SERVER:
        weights -= lr * gradients
    fetch(weights, group)
    vector_to_parameters(weights, model.parameters())


def demo(group: dist.ProcessGroup) -> float:
    """Train three steps on 11 samples [11, 4] split over the workers; return the largest error of the weights."""
    torch.manual_seed(1)
    inputs, targets, mine = *torch.randn(2, 11, 4).double(), slice(group.rank(), None, group.size())
    model, alone = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    alone.load_state_dict(model.state_dict())
    for _ in range(3):
        step(model, inputs[mine], targets[mine], 0.1, group)
        gradients = torch.autograd.grad((alone(inputs) - targets).square().mean(), list(alone.parameters()))
        for parameter, gradient in zip(alone.parameters(), gradients, strict=True):
            parameter.data -= 0.1 * gradient
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: weights differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
