"""A batch whose microbatches are worked on by all shards together, one after the other.

A gradient does not mind how samples are put together. Experts do: what finds a place, and what balance asks for, is a
matter of all tokens that are routed at once. So a batch is parted first and dealt then, each shard some samples of each
microbatch, and one process takes the same microbatches whole.
"""

import torch

from workers.workload.data import Batches, Microbatch, shard_sizes


class PartedBatches(Batches):
    """In LAB_MICROBATCHES parts, each of which is dealt to all shards."""

    def alone(self, step: int) -> list[Microbatch]:
        """The microbatches of a step, as one process takes them."""
        share = self.share(self.batch, 1)
        return [self._microbatch(part, share) for part in self._order(step).split(self.sizes())]

    def dealt(self, step: int, shard: int, num_shards: int) -> list[Microbatch]:
        """This shard's part of each microbatch."""
        share = self.share(self.batch, num_shards)
        return [self._microbatch(torch.tensor(part), share) for part in self._parts(step, shard, num_shards)]

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        """The numbers of the samples that `shard` gets at `step`."""
        return [number for part in self._parts(step, shard, num_shards) for number in part]

    def sizes(self) -> list[int]:
        """Samples of each microbatch; as equal as can be where uneven ones would leave a rank without any."""
        parts = self.config.num_microbatches
        uneven = shard_sizes(self.batch, parts, uneven=self.uneven)
        return uneven if min(uneven) >= self.config.world_size else shard_sizes(self.batch, parts)

    def _parts(self, step: int, shard: int, num_shards: int) -> list[list[int]]:
        found = []
        for part in self._order(step).split(self.sizes()):
            sizes = shard_sizes(len(part), num_shards, uneven=self.uneven)
            start = sum(sizes[:shard])
            found.append(part[start : start + sizes[shard]].tolist())
        return found
