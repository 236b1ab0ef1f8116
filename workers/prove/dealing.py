"""The whole batch of a step, and each rank's microbatches of it, uneven wherever the batch allows it.

Equal parts hide a mean of means: a loss that is averaged over a rank's own samples, or a microbatch's own tokens, is
right there and wrong everywhere else. A file whose strategy takes equal parts alone says `even = True`.
"""

import torch
from torch import Tensor

from workers.prove.theirs import Refused, Theirs
from workers.workload.data import Batches, Microbatch, shard_sizes


class Dealing:
    """The batches of a proof, dealt along the axis dp."""

    def __init__(self, theirs: Theirs, num_shards: int) -> None:
        self.theirs, self.num_shards = theirs, num_shards
        config = theirs.config
        self._batches = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)
        self.even = bool(theirs.found.get("even", False))

    def whole(self, step: int) -> Microbatch:
        """All samples, as one process takes them."""
        if "batch" in self.theirs:
            inputs, targets = self._own(step)
        else:
            inputs, targets, _ = self._batches.full(step)
        terms = self.theirs.terms(targets)
        if terms < 1:
            raise Refused(f"batch({self.theirs.config.seed}, {step}) has no loss term: all of its targets are padding")
        return Microbatch(inputs, targets, 1 / terms)

    def dealt(self, step: int, shard: int) -> list[Microbatch]:
        """What one shard works on."""
        inputs, targets, share = self.whole(step)
        sizes = self.sizes(len(inputs))
        start = sum(sum(each) for each in sizes[:shard])
        parts = []
        for size in sizes[shard]:
            parts.append(Microbatch(inputs[start : start + size], targets[start : start + size], share))
            start += size
        return parts

    def sizes(self, batch: int) -> list[list[int]]:
        """Samples of each microbatch of each shard; raises Refused where they cannot be dealt."""
        shards, parts = self.num_shards, self.theirs.config.num_microbatches
        if self.even and batch % (shards * parts):
            raise Refused(
                f"a batch of {batch} samples is no multiple of {shards} shards x {parts} microbatches, and the file"
                " says even = True"
            )
        if batch < shards:
            raise Refused(f"a batch of {batch} samples is smaller than its {shards} shards: every rank needs a sample")
        found = []
        for size in shard_sizes(batch, shards, uneven=not self.even):
            count = min(parts, size)
            found.append(shard_sizes(size, count, uneven=not self.even))
        return found

    def _own(self, step: int) -> tuple[Tensor, Tensor]:
        seed = self.theirs.config.seed
        found = self.theirs["batch"](seed, step)
        two = isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(each, Tensor) for each in found)
        if not two or len(found[0]) != len(found[1]):
            shown = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in found] if (
                isinstance(found, tuple | list)
            ) else type(found).__name__  # fmt: skip
            raise Refused(
                f"batch({seed}, {step}) returned {shown}: allowed are inputs and targets, two tensors of as many"
                " samples"
            )
        inputs, targets = (each.double() if each.is_floating_point() else each for each in found)
        return inputs, targets
