"""Three typical wrong answers to puzzle 11, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"losses on rank 0 differs from one process: by (nan|inf)",
    2: r"losses on rank 0 .* a loss to which ranks that do not have the target added another logit",
    3: r"all_gather is called at 11_vocabulary_loss.py:\d+ on rank 0; allowed here: all_reduce",
}
Losses = tuple[Tensor, Tensor]


def cross_entropy_1(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Losses:
    """The largest logit is not subtracted."""
    total = logits.exp().sum(1)
    dist.all_reduce(total, group=group)
    mine = ((targets >= first) & (targets < first + logits.shape[1])).nonzero()[:, 0]
    target = torch.zeros_like(total)
    target[mine] = logits[mine, targets[mine] - first]
    dist.all_reduce(target, group=group)
    gradient = logits.exp() / total[:, None]
    gradient[mine, targets[mine] - first] -= 1
    return total.log() - target, gradient


def cross_entropy_2(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Losses:
    """Ranks that do not have the target use their nearest word."""
    largest = logits.max(1).values
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponentials = (logits - largest[:, None]).exp()
    total = exponentials.sum(1)
    dist.all_reduce(total, group=group)
    words = (targets - first).clamp(0, logits.shape[1] - 1)
    target = logits[torch.arange(len(targets)), words]
    dist.all_reduce(target, group=group)
    gradient = exponentials / total[:, None]
    gradient[torch.arange(len(targets)), words] -= 1
    return total.log() + largest - target, gradient


def cross_entropy_3(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Losses:
    """All logits are gathered, each rank's padded to the widest."""
    width = torch.tensor(logits.shape[1])
    widths = [torch.empty_like(width) for _ in range(group.size())]
    dist.all_gather(widths, width, group=group)
    padded = torch.nn.functional.pad(logits, (0, int(max(widths)) - logits.shape[1]), value=-torch.inf)
    parts = [torch.empty_like(padded) for _ in widths]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:, : int(each)] for part, each in zip(parts, widths, strict=True)], 1).requires_grad_()
    losses = torch.nn.functional.cross_entropy(whole, targets, reduction="none")
    losses.sum().backward()
    return losses.detach(), whole.grad[:, first : first + logits.shape[1]]
