"""Gradients compressed (top-k with error feedback): torchrun --nproc-per-node 3 lesson.py"""

import torch
import torch.distributed as dist
from torch import Tensor


class TopK:
    """Replaces a bucket's all_reduce: each rank sends the k = ratio·n largest of n numbers, and their positions.

    It sends (N-1)·(4 + s)k bytes for s bytes per number, an all_reduce 2(N-1)/N·s·n: it pays while N < 1/ratio.
    """

    def __init__(self, group: dist.ProcessGroup, ratio: float) -> None:
        self.group, self.ratio, self.residual = group, ratio, None  # not sent yet [n]

    def __call__(self, bucket: Tensor) -> None:
        """Leaves in `bucket` [n] the sum of what all ranks sent."""
        values = bucket.clone() if self.residual is None else bucket + self.residual  # sent late, not lost
        k = max(1, round(self.ratio * len(values)))
        places = values.abs().topk(k).indices.int()
        message = torch.cat([places.view(torch.uint8), values[places].view(torch.uint8)])  # [(4 + s)k] bytes
        self.residual = values.index_fill(0, places.long(), 0)
        received = [torch.empty_like(message) for _ in range(self.group.size())]
        dist.all_gather(received, message, group=self.group)  # positions differ, so no all_reduce could add these
        bucket.zero_()
        for each in received:  # in the same order on all ranks, so that their sums are equal to the bit
            places, numbers = each[: 4 * k].clone().view(torch.int32), each[4 * k :].clone().view(bucket.dtype)
            bucket.index_add_(0, places, numbers)


def demo(group: dist.ProcessGroup) -> float:
    """Take 20 steps that send 5 of 100 numbers; return the error of sent plus residual against all gradients."""
    torch.manual_seed(group.rank())
    compressed, total, sent = TopK(group, ratio=0.05), torch.zeros(100).double(), torch.zeros(100).double()
    for _ in range(20):
        gradient = torch.randn(100).double()
        total += gradient
        compressed(gradient)
        sent += gradient
    sums = torch.stack([total, compressed.residual])
    dist.all_reduce(sums, group=group)
    return (sent + sums[1] - sums[0]).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: sent + left differs from all gradients by {demo(dist.group.WORLD):.0e} at most")
    dist.destroy_process_group()
