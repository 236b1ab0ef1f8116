"""Three typical wrong answers to puzzle 16, and why each is refused."""

import torch
import torch.distributed as dist
from torch import Tensor

REFUSED = {
    1: r"error 0 on rank 0 .* it is 0: what was not sent is lost",
    2: r"error 0 on rank 0 .* it is all that was wanted, also what was sent, which is added twice",
    3: r"all_reduce is called at 16_topk_error_feedback.py:\d+ on rank 0; allowed here: all_gather",
}


def mean_of(places: Tensor, values: Tensor, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    all_places = [torch.empty_like(places) for _ in range(group.size())]
    all_values = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(all_places, places, group=group)
    dist.all_gather(all_values, values, group=group)
    return torch.zeros_like(like).index_add_(0, torch.cat(all_places), torch.cat(all_values) / group.size())


def topk_step_1(gradient: Tensor, error: Tensor, k: int, group: dist.ProcessGroup) -> Tensor:
    """No error feedback: what is not sent is lost."""
    places = gradient.abs().topk(k).indices
    return mean_of(places, gradient[places], gradient, group)


def topk_step_2(gradient: Tensor, error: Tensor, k: int, group: dist.ProcessGroup) -> Tensor:
    """What was sent stays in the error too."""
    error += gradient
    places = error.abs().topk(k).indices
    return mean_of(places, error[places], gradient, group)


def topk_step_3(gradient: Tensor, error: Tensor, k: int, group: dist.ProcessGroup) -> Tensor:
    """The zeros between the k numbers are sent as well."""
    error += gradient
    places = error.abs().topk(k).indices
    mean = torch.zeros_like(gradient)
    mean[places] = error[places] / group.size()
    error[places] = 0
    dist.all_reduce(mean, group=group)
    return mean
