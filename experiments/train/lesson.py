"""Who gets which samples (DistributedSampler): torchrun --nproc-per-node 3 lesson.py"""

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist


class DistributedSampler:
    """Splits `length` samples over N ranks without communication: all draw the same order, a new one each epoch."""

    def __init__(self, length: int, rank: int, ranks: int, seed: int) -> None:
        self.length, self.rank, self.ranks, self.seed, self.epoch = length, rank, ranks, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Call it before each epoch; otherwise all epochs have the order of the first."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.length // self.ranks)  # ceil(length / N): equal on all ranks, or one would wait

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.length, generator=generator).tolist()
        order += order[: -self.length % self.ranks]  # repeat the first ones if N does not divide the length
        return iter(order[self.rank :: self.ranks])  # each N-th, from this rank on


def demo(group: dist.ProcessGroup) -> float:
    """Shard 100 samples in two epochs; count missing and needlessly repeated ones, and all if the order repeats."""
    sampler, before = DistributedSampler(100, group.rank(), group.size(), seed=42), None
    for epoch in range(2):
        sampler.set_epoch(epoch)
        dist.all_gather_object(shards := [None] * group.size(), list(sampler), group=group)
        times = Counter(sample for shard in shards for sample in shard)
        off = max(100 - len(times), abs(times.total() - 100 - -100 % group.size()), 100 * (shards == before))
        before = shards
    return float(off)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: the samples used differ from each once by {demo(dist.group.WORLD):.0f} at most")
    dist.destroy_process_group()
