"""The global batch of a step, and each shard's part of it: a function of (seed, step, shard), with no state.

An epoch is a permutation of the samples, drawn from (seed, epoch). Step s takes the next LAB_BATCH of them, and the
shards divide these among themselves, disjoint and complete, in runs that need not be of one length. What a shard
gets is weighed by `share`, one over the loss terms of the whole global batch: sums weighed so add up to the mean over
the batch, however unevenly it was dealt. Means of shards would not (a shard of 6 beside one of 8 counts 8/6).
"""

import random
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.config import Config
from workers.workload import own, text

OWN_BATCHES = 8  # of an epoch
LINE_STEPS = 201  # steps 0 to 200 of the lesson's table


class Microbatch(NamedTuple):
    """`model(inputs, targets) * share`, summed over all microbatches of all shards, is the mean loss of the batch."""

    inputs: Tensor  # gpt [B, S] tokens; mlp [B, D]; line [B, 1]
    targets: Tensor  # of the same shape
    share: float


class Samples(Protocol):
    """A data set: some samples by number."""

    terms: int  # loss terms of one sample

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]: ...


class Text:
    """Windows of LAB_SEQ bytes; the target of each byte is the next one."""

    def __init__(self, config: Config) -> None:
        self.bytes = torch.frombuffer(bytearray(text.read(config)), dtype=torch.uint8)
        self.terms = config.seq

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.terms

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        starts = ids * self.terms % (len(self.bytes) - self.terms)  # wraps: a text of one sample is enough
        windows = self.bytes[starts[:, None] + torch.arange(self.terms + 1)].long()  # [B, S+1]
        return windows[:, :-1], windows[:, 1:]


class Points:
    """The first lesson's: y = 2x + 1 and noise of 0.1, x uniform in (-1, 1); mlp has LAB_WIDTH of them a sample."""

    def __init__(self, num_samples: int, terms: int, seed: int) -> None:
        self.terms = terms
        draw = random.Random(seed)
        pairs = []
        for _ in range(num_samples * terms):
            x = draw.uniform(-1.0, 1.0)
            pairs.append((x, 2.0 * x + 1.0 + draw.gauss(0.0, 0.1)))
        points = torch.tensor(pairs, dtype=torch.float64).view(num_samples, terms, 2)
        self.x, self.y = points[..., 0], points[..., 1]  # [N, D]

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[ids], self.y[ids]


class Own:
    """The batches of a model's own file, one after the other."""

    def __init__(self, spec: str, seed: int, num_batches: int) -> None:
        made = [own.beside(spec, "batch")(seed, step) for step in range(num_batches)]
        self.inputs, self.targets = (torch.cat([each[side] for each in made]) for side in (0, 1))
        self.terms = self.targets[0].numel()

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[ids], self.targets[ids]


class Batches:
    """Every step's batch. `proof`: float64-sized data that sees mistakes, two global batches, uneven shards.

    Two batches, so that the third step begins the second epoch, where a forgotten set_epoch shows. Uneven shards
    and microbatches wherever the batch allows it, since equal ones hide the mean of means.
    """

    def __init__(self, config: Config, *, proof: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.batch = config.batch
        self.uneven = proof or config.model == "line"
        self.samples, self.num_batches = _data_set(config, self.batch, proof)
        self.proof_steps = LINE_STEPS if config.model == "line" else 3

    def full(self, step: int) -> Microbatch:
        """The whole global batch, as one process takes it."""
        return self._microbatch(self._order(step), 1 / (self.batch * self.samples.terms))

    def alone(self, step: int) -> list[Microbatch]:
        """What one process works on, whose gradients add up to those of the step: the batch as it is."""
        return [self.full(step)]

    def dealt(self, step: int, shard: int, num_shards: int) -> list[Microbatch]:
        """What `shard` works on at `step`, in LAB_MICROBATCHES parts (fewer where it has fewer samples)."""
        ids = torch.tensor(self.sample_ids(step, shard, num_shards))
        share = self.share(len(ids), num_shards)
        parts = min(self.config.num_microbatches, len(ids))
        sizes = shard_sizes(len(ids), parts, uneven=self.uneven)
        return [self._microbatch(part, share) for part in ids.split(sizes)]

    def share(self, num_samples: int, num_shards: int) -> float:  # noqa: ARG002  the same however the batch is dealt
        """What each loss term of a shard of `num_samples` counts: one over the terms of the whole batch."""
        return 1 / (self.batch * self.samples.terms)

    def sample_ids(self, step: int, shard: int, num_shards: int) -> list[int]:
        """The numbers of the samples that `shard` gets at `step`."""
        sizes = shard_sizes(self.batch, num_shards, uneven=self.uneven)
        start = sum(sizes[:shard])
        ids: list[int] = self._order(step)[start : start + sizes[shard]].tolist()
        return ids

    def full_ids(self, step: int) -> list[int]:
        """The numbers of all samples of the global batch at `step`."""
        ids: list[int] = self._order(step).tolist()
        return ids

    def _order(self, step: int) -> Tensor:
        if self.config.model == "line":
            return torch.arange(self.batch)  # every step sees all points, and a worker keeps its shard
        epoch, index = divmod(step, self.num_batches)
        order = permutation(self.config.seed, epoch, self.num_batches * self.batch)
        return order[index * self.batch : (index + 1) * self.batch]

    def _microbatch(self, ids: Tensor, share: float) -> Microbatch:
        inputs, targets = (
            values.to(self.device, self.dtype if values.is_floating_point() else values.dtype)
            for values in self.samples.take(ids)
        )
        return Microbatch(inputs, targets, share)


def _data_set(config: Config, batch: int, proof: bool) -> tuple[Samples, int]:
    """The samples, and how many global batches an epoch holds."""
    if own.is_own(config.model) and not own.reads_text(config.model):
        num_batches = 2 if proof else OWN_BATCHES
        return Own(config.model, config.seed, num_batches), num_batches
    if config.model == "line":
        return Points(batch, 1, config.seed), 1
    if config.model == "mlp":
        num_batches = 2 if proof else 8
        return Points(num_batches * batch, config.width, config.seed), num_batches
    samples = Text(config)
    return samples, 2 if proof else max(1, min(len(samples) // batch, 1024))


def permutation(seed: int, epoch: int, num_samples: int) -> Tensor:
    """The order of an epoch: another for each, the same in every process."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(num_samples, generator=generator)


def shard_sizes(batch: int, num_shards: int, *, uneven: bool = False) -> list[int]:
    """Samples of each shard: as equal as can be, the first ones larger; never none if batch >= num_shards.

    With `uneven`, shards that would be equal are not, wherever they hold more than one sample: shard 1 gives up to
    two away, as in the lesson's 8, 6, 9, 9.
    """
    sizes = [batch // num_shards + (shard < batch % num_shards) for shard in range(num_shards)]
    if uneven and num_shards > 1 and batch % num_shards == 0:
        takers = [shard for shard in reversed(range(num_shards)) if shard != 1]
        for given in range(min(2, sizes[1] - 1)):
            sizes[1] -= 1
            sizes[takers[given % len(takers)]] += 1
    return sizes


def effective_batch(config: Config, num_replicas: int) -> str:
    """Samples of a step as microbatch x accumulation x replicas, or as a sum where they do not divide evenly."""
    batch, accumulated = config.batch, config.num_microbatches
    sizes = shard_sizes(batch, num_replicas, uneven=config.model == "line")
    if len(set(sizes)) == 1 and sizes[0] % accumulated == 0:
        micro = sizes[0] // accumulated
        return f"{batch} samples a step = {micro} x {accumulated} x {num_replicas} (microbatch, accumulated, replicas)"
    held = " + ".join(str(size) for size in sizes)
    return f"{batch} samples a step = {held}, a replica each, {accumulated} microbatch(es) accumulated"


def refusals(config: Config, num_shards: int) -> list[str]:
    """Sentences if the batch cannot be dealt to `num_shards` in LAB_MICROBATCHES parts each."""
    batch = config.batch
    if batch < num_shards:
        return [f"LAB_BATCH={batch} is smaller than WORLD_SIZE={num_shards}: every rank needs a sample"]
    if config.num_microbatches > batch // num_shards:
        most = batch // num_shards
        return [
            f"LAB_MICROBATCHES={config.num_microbatches} is more than the {most} samples of a rank, allowed: 1 to"
            f" {most}"
        ]
    return []
