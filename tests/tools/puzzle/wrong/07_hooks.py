"""Three typical wrong answers to puzzle 7, and why each is refused."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import Parameter

REFUSED = {
    1: r"no all_reduce was launched before the backward pass reached the first layer on rank 0",
    2: r"the backward pass waits for all_reduce at 07_hooks.py:\d+ on rank 0",
    3: r"0.weight on rank 0 .* it is this rank's own gradient, which was never averaged",
}


class Buckets:
    """Gradients by bucket; the caller launches the last one."""

    def __init__(self, bucket_bytes: int, group: dist.ProcessGroup, *, waits: bool = False) -> None:
        self.bucket_bytes, self.group, self.waits = bucket_bytes, group, waits
        self.bucket, self.launched = [], []

    def launch(self) -> None:
        flat = torch.cat([each.grad.reshape(-1) for each in self.bucket])
        work = dist.all_reduce(flat, group=self.group, async_op=not self.waits)
        self.launched.append((work, flat, list(self.bucket)))
        self.bucket.clear()

    def ready(self, parameter: Parameter) -> None:
        self.bucket.append(parameter)
        if sum(each.grad.nbytes for each in self.bucket) >= self.bucket_bytes:
            self.launch()

    def write(self) -> None:
        for work, flat, parameters in self.launched:
            if work is not None:
                work.wait()
            for each, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
                each.grad.copy_(part.view_as(each) / self.group.size())


def attach_1(model: torch.nn.Module, bucket_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """All buckets are launched after the backward pass."""
    buckets = Buckets(bucket_bytes, group)

    def finish() -> None:
        for parameter in reversed(list(model.parameters())):
            buckets.ready(parameter)
        if buckets.bucket:
            buckets.launch()
        buckets.write()

    return finish


def attach_2(model: torch.nn.Module, bucket_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Each hook waits for its all_reduce, and so the backward pass does."""
    buckets = Buckets(bucket_bytes, group, waits=True)
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(buckets.ready)

    def finish() -> None:
        if buckets.bucket:
            buckets.launch()
        buckets.write()

    return finish


def attach_3(model: torch.nn.Module, bucket_bytes: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """The last bucket is never full, and never launched."""
    buckets = Buckets(bucket_bytes, group)
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(buckets.ready)
    return buckets.write
