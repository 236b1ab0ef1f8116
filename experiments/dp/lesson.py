"""Data parallelism: torchrun --nproc-per-node 3 lesson.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Bucket:  # some parameters' gradients in one vector, so that one call sums them all
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.missing = parameters, 0  # gradients that are not written yet
        self.flat = torch.cat([torch.zeros_like(parameter).flatten() for parameter in parameters])  # [P]
        for parameter, piece in zip(parameters, self.flat.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)  # autograd adds to it in its place


class DataParallel:
    """A whole model on each rank of `group`, a part of the batch on each, and one gradient for all."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: float) -> None:
        self.model, self.group, members = model, group, [list[nn.Parameter]()]
        for parameter in reversed(list(model.parameters())):  # the backward pass reaches the last layer first
            dist.broadcast(parameter.detach(), group=group, group_src=0)  # unequal replicas would stay unequal
            if sum(each.nbytes for each in members[-1]) >= bucket_bytes:
                members.append([])
            members[-1].append(parameter)
        self.buckets = [Bucket(parameters) for parameters in members]
        self.bucket_of: dict[Tensor, Bucket] = {each: bucket for bucket in self.buckets for each in bucket.parameters}

    def step(self, microbatches: list[tuple[Tensor, Tensor, float]]) -> Tensor:
        """Leaves the gradient of the whole batch's mean loss in every parameter; returns this rank's share of it."""
        self.sums, losses, hooks = list[dist.Work | None](), [], []
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            bucket.flat.zero_()
        for number, (inputs, targets, share) in enumerate(microbatches, 1):
            if number == len(microbatches):  # earlier gradients are summed locally, nothing is sent
                hooks = [each.register_post_accumulate_grad_hook(self.launch) for each in self.bucket_of]
            loss = self.model(inputs, targets) * share  # a sum of terms / the terms of the whole batch, on all ranks
            loss.backward()
            losses.append(loss.detach())
        for hook in hooks:
            hook.remove()
        self.launch()  # also buckets with a missing gradient here: another rank may have it
        for work in self.sums:
            work.wait()
        return torch.stack(losses).sum()

    def launch(self, *written: Tensor) -> None:
        """Begin to sum what is complete, in one order on all ranks: each sends 2(N-1)/N of a bucket's bytes."""
        for parameter in written:
            self.bucket_of[parameter].missing -= 1
        for bucket in self.buckets[len(self.sums) :]:
            if bucket.missing and written:
                break
            self.sums.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))


class Regression(nn.Sequential):
    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (super().forward(inputs) - targets).square().sum()


def demo(group: dist.ProcessGroup) -> float:
    """Train on 11 samples [11, 4] split over the ranks; return the largest gradient error against one process."""
    inputs, targets = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(1)).double()
    torch.manual_seed(group.rank())  # weights of its own
    model = Regression(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    mine = torch.arange(11)[group.rank() :: group.size()]
    replica = DataParallel(model, group, bucket_bytes=256)
    for _ in range(2):
        replica.step([(inputs[part], targets[part], 1 / targets.numel()) for part in (mine[:1], mine[1:])])
    expected = torch.autograd.grad(model(inputs, targets) / targets.numel(), list(model.parameters()))
    return max((each.grad - right).abs().max().item() for each, right in zip(model.parameters(), expected, strict=True))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients differ from one process's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
