"""Pipeline parallelism (1F1B): torchrun --nproc-per-node 3 lesson.py"""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Returns a rank's passes in order: one forward per later rank, then both in turn, then the last backwards."""
    ahead = min(ranks - 1 - rank, microbatches)
    return ["forward"] * ahead + ["forward", "backward"] * (microbatches - ahead) + ["backward"] * ahead


class Pipeline:
    """One stage per rank. Ranks idle for (p-1)/(m+p-1) of a step, and rank r stores at most p - r of m microbatches."""

    def __init__(self, stage: nn.Module, loss: Callable, between: tuple[int, ...], group: dist.ProcessGroup) -> None:
        self.stage, self.loss, self.between, self.group = stage, loss, between, group  # messages are [b, *between]
        self.rank, self.last = group.rank(), group.size() - 1

    def step(self, microbatches: list[tuple[Tensor, Tensor, float]]) -> Tensor | None:
        """Adds all gradients of this stage's parameters; returns the batch's loss on the last stage's rank."""
        self.saved, self.sent, self.total = deque(), [], 0.0
        batch = iter(microbatches)  # every rank has the whole batch: the first needs its inputs, the last its targets
        for action in one_forward_one_backward(self.rank, self.last + 1, len(microbatches)):
            self.forward(*next(batch)) if action == "forward" else self.backward()
        while self.sent:
            self.sent.pop().wait()
        return self.total if self.rank == self.last else None

    def forward(self, inputs: Tensor, targets: Tensor, share: float) -> None:
        hidden = self.receive(self.rank - 1, len(inputs)).requires_grad_() if self.rank > 0 else inputs  # [b, *between]
        output = self.stage(hidden)
        if self.rank < self.last:
            self.send(output.detach(), self.rank + 1)
        else:
            output = self.loss(output, targets) * share  # a sum of terms / the terms of the whole batch
            self.total = self.total + output.detach()
        self.saved.append((hidden, output))  # the graph is kept until the backward pass

    def backward(self) -> None:
        hidden, output = self.saved.popleft()  # the oldest
        gradient = None if self.rank == self.last else self.receive(self.rank + 1, len(output))
        torch.autograd.backward(output, gradient)
        if self.rank > 0:
            self.send(hidden.grad, self.rank - 1)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Does not wait: two neighbours that both wait for their sends would wait for ever."""
        self.sent.append(dist.isend(tensor.contiguous(), group=self.group, group_dst=rank))

    def receive(self, rank: int, samples: int) -> Tensor:
        buffer = next(self.stage.parameters()).new_empty(samples, *self.between)  # kept until its backward pass
        dist.recv(buffer, group=self.group, group_src=rank)
        return buffer


def demo(group: dist.ProcessGroup) -> float:
    """Train a layer per rank on 11 samples in 4 microbatches; return the largest error of a gradient."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(group.size()))).double()
    inputs, targets, mine = *torch.randn(2, 11, 4).double(), model[group.rank()]
    (loss := nn.MSELoss(reduction="sum"))(model(inputs), targets).div(11).backward()
    wanted = [parameter.grad.clone() for parameter in mine.parameters()]
    model.zero_grad()
    parts = zip(inputs.split(3), targets.split(3), [1 / 11] * 4, strict=True)
    Pipeline(mine, loss, (4,), group).step(list(parts))
    return max((p.grad - other).abs().max().item() for p, other in zip(mine.parameters(), wanted, strict=True))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
