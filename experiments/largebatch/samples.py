"""Fresh samples for every step, dealt in batches of any multiple of the base, and others to judge by.

A batch of k times the base at step s is what k steps of the base batch take one after the other, from k·s on. So every
k sees the same samples, each once, and differs in nothing but how many it takes at a time. Held-out samples are drawn
by the same seed and seen by no step.
"""

import torch
from torch import Tensor

from workers.config import Config
from workers.workload.data import Microbatch, Points, Samples, Text, permutation, shard_sizes

HELD_OUT = 256


class Stream:
    """`steps` base batches of LAB_BATCH samples, in an order by `seed`."""

    def __init__(self, config: Config, seed: int, steps: int, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.samples, trained, held = _drawn(config, seed, steps * config.batch)
        self.terms = self.samples.terms
        self.inputs, self.targets = self._take(trained, dtype)
        self.held_out = Microbatch(*self._take(held, torch.float32), 1 / (len(held) * self.terms))

    def dealt(self, k: int, step: int, shard: int, num_shards: int, *, uneven: bool = False) -> list[Microbatch]:
        """What `shard` works on at `step` of a batch of k times the base, in LAB_MICROBATCHES parts."""
        own = self.places(k, step, shard, num_shards, uneven=uneven)
        sizes = shard_sizes(len(own), min(self.config.num_microbatches, len(own)))
        share = 1 / (k * self.config.batch * self.terms)
        starts = [own.start + sum(sizes[:part]) for part in range(len(sizes))]
        return [
            Microbatch(self.inputs[start : start + size], self.targets[start : start + size], share)
            for start, size in zip(starts, sizes, strict=True)
        ]

    def places(self, k: int, step: int, shard: int, num_shards: int, *, uneven: bool = False) -> range:
        """Where in the order the samples of `shard` stand."""
        batch = k * self.config.batch
        sizes = shard_sizes(batch, num_shards, uneven=uneven)
        start = step * batch + sum(sizes[:shard])
        return range(start, start + sizes[shard])

    def _take(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inputs, targets = (
            values.to(self.device, dtype if values.is_floating_point() else values.dtype)
            for values in self.samples.take(ids)
        )
        return inputs, targets


def _drawn(config: Config, seed: int, num_samples: int) -> tuple[Samples, Tensor, Tensor]:
    """The data set, and the numbers of the samples to train on and to judge by; a short text is read over again."""
    if config.model == "mlp":
        ids = torch.arange(num_samples + HELD_OUT)
        return Points(len(ids), config.width, seed), ids[:num_samples], ids[num_samples:]
    samples = Text(config)
    order = permutation(seed, 0, len(samples))
    held = min(HELD_OUT, max(1, len(order) // 8))
    kept = order[:-held]
    repeats = -(-num_samples // len(kept))
    return samples, kept.repeat(repeats)[:num_samples], order[-held:]
