"""PyTorch's own way for rows to travel: `all_to_all_single` with uneven splits, in the place of our messages.

It records nothing for autograd by itself, like all of torch.distributed: around it stands what stands around ours.
"""

import torch.distributed as dist
from torch import Tensor

from workers.parallel.phases import phase


class AllToAllSingle:
    """Rows of uneven numbers from each rank of `group` to each, in one call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        came = rows.new_empty(sum(take), rows.shape[1])
        with phase("receive"):
            dist.all_to_all_single(came, rows.contiguous(), take, give, group=self.group)
        return came
