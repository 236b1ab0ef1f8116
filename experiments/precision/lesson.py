"""16 bits with float32 masters and a scaled loss: torchrun --nproc-per-node 3 lesson.py"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Masters:
    """float32 weights that the optimizer updates, behind 16-bit ones that compute: 2 + 2 + 4 bytes per parameter."""

    def __init__(self, computing: Iterable[nn.Parameter]) -> None:  # before they are rounded to 16 bits
        self.computing = list(computing)
        self.parameters = [nn.Parameter(each.detach().float().clone()) for each in self.computing]

    @torch.no_grad()
    def deliver(self, scale: float) -> None:
        """Copies the gradients to float32 and unscales them there: in 16 bits they would underflow again."""
        for weight, master in zip(self.computing, self.parameters, strict=True):
            master.grad = weight.grad.float() / scale

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the updated masters into the weights: masters accumulate updates that 16 bits would lose."""
        for weight, master in zip(self.computing, self.parameters, strict=True):
            weight.copy_(master)
            master.grad = None


class LossScale:
    """fp16 ends at 2^-24, below which gradients become 0: the loss is scaled up as far as they allow."""

    def __init__(self) -> None:
        self.value, self.good_steps = 65536.0, 0

    def adjust(self, *, overflowed: bool) -> None:
        """Halves the scale after an overflow, whose step is skipped; doubles it after 2000 good steps."""
        self.good_steps = 0 if overflowed else (self.good_steps + 1) % 2000
        if overflowed:
            self.value /= 2  # a power of two stays one: no digit of a gradient is rounded by it
        elif self.good_steps == 0:
            self.value = min(2 * self.value, 2.0**127)  # a float32's largest power


def step(
    model: nn.Module, masters: Masters, scale: LossScale, loss: Tensor, lr: float, group: dist.ProcessGroup
) -> None:
    """Passes in 16 bits, the sum over the ranks too, at half the bytes; the update in float32."""
    model.zero_grad()
    (loss * scale.value).backward()
    for weight in masters.computing:
        dist.all_reduce(weight.grad, group=group)
    overflowed = not all(weight.grad.isfinite().all() for weight in masters.computing)  # equal on all ranks
    if not overflowed:
        masters.deliver(scale.value)
        for master in masters.parameters:
            master.data -= lr * master.grad
        masters.refresh()
    scale.adjust(overflowed=overflowed)


def demo(group: dist.ProcessGroup) -> float:
    """Run 10 steps with a gradient too small for fp16, and another that overflows at first."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    masters, scale = Masters(model.parameters()), LossScale()
    model.half()
    slopes = torch.tensor([2.0**-26, 4.0])
    while scale.good_steps < 10:
        step(model, masters, scale, (model.weight.float() * slopes).sum(), 4.0, group)
    wanted = 1 - 10 * 4 * group.size() * slopes.double()
    return (masters.parameters[0].double() - wanted).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: weights differ from float32's by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
