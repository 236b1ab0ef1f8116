"""One process that computes what a worker should: samples from (seed, step, rank), their gradient, a push of them.

It shares nothing with the workers but the model's layers, the bytes of the text and the sentence that says how a batch
is dealt; so a worker that takes another's shard, weighs a loss twice or pushes N times stands against it. Written down
here again:

    epoch     a permutation of the samples, of the seed 1000003·LAB_SEED + epoch; step s takes the next B of it
    shard     B divided by N, the first ones larger; where a proof or `line` asks for it, rank 1 gives up to two away
    gradient  sum over a shard's loss terms / terms of the whole batch, one backward pass
    push      of n steps: sum of n gradients, each at weights that the ones before have moved (Dean et al. 2012,
              algorithm 7.1)
"""

import hashlib
import random
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from workers.config import Config
from workers.workload import text
from workers.workload.data import OWN_BATCHES, Own
from workers.workload.model import Model
from workers.workload.own import is_own, reads_text

MOST_BATCHES = {"line": 1, "mlp": 8, "gpt": 1024}  # of an epoch; a proof has two


class OneProcess:
    """The dense `model`, which becomes this object's own, and every worker's samples."""

    def __init__(self, model: Model, config: Config, *, proof: bool, device: torch.device, dtype: torch.dtype) -> None:
        model.recompute = False
        self.model, self.config, self.device, self.dtype = model, config, device, dtype
        from_text = reads_text(config.model)
        num_own = 2 if proof else OWN_BATCHES
        self.own = Own(config.model, config.seed, num_own) if is_own(config.model) and not from_text else None
        known = {"line": 1, "mlp": config.width}
        self.terms = self.own.terms if self.own else known.get(config.model, config.seq)
        self.shards = list(pairwise(cuts(config.batch, config.world_size, uneven=proof or config.model == "line")))
        self.text = torch.frombuffer(bytearray(text.read(config)), dtype=torch.uint8) if from_text else None
        many = OWN_BATCHES if self.own else MOST_BATCHES.get(config.model, MOST_BATCHES["gpt"])
        most = 2 if proof and config.model != "line" else many
        whole = (len(self.text) - 1) // config.seq // config.batch if self.text is not None else most
        self.num_batches = most if proof else max(1, min(whole, most))
        if self.text is None and self.own is None:
            self.points = points(config.seed, self.num_batches * config.batch, self.terms)
        self._epoch, self._order = -1, torch.zeros(0)

    def samples(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all that `rank` trains on at `step`, one after the other."""
        begin, end = self.shards[rank]
        ids = self.order(step)[begin:end]
        if self.own is not None:
            inputs, targets = self.own.take(ids)
            return inputs.to(self.device, self.dtype if inputs.is_floating_point() else None), targets.to(
                self.device, self.dtype if targets.is_floating_point() else None
            )
        if self.text is None:
            x, y = self.points[ids].to(self.device, self.dtype).unbind(-1)  # [B/N, terms] each
            return x, y
        starts = [index * self.config.seq % (len(self.text) - self.config.seq) for index in ids.tolist()]
        windows = torch.stack([self.text[start : start + self.config.seq + 1] for start in starts])
        windows = windows.to(self.device, torch.int64)
        return windows[:, :-1], windows[:, 1:]

    def order(self, step: int) -> Tensor:
        """The numbers of the samples of the batch of `step`."""
        size = self.config.batch
        if self.config.model == "line":
            return torch.arange(size)
        epoch, index = step // self.num_batches, step % self.num_batches
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.num_batches * size, generator=generator)
        return self._order[index * size : index * size + size]

    def gradient(self, weights: Tensor, step: int, rank: int) -> tuple[Tensor, float]:
        """Of `rank`'s samples at `step`, at `weights` [P]: their gradient [P] and mean loss."""
        inputs, targets = self.samples(step, rank)
        parameters = list(self.model.parameters())
        vector_to_parameters(weights.clone(), parameters)
        total = self.model(inputs, targets)
        loss = total / (self.config.batch * self.terms)
        gradient = parameters_to_vector(torch.autograd.grad(loss, parameters))
        return gradient, total.item() / targets.numel()

    def push(self, weights: Tensor, first_step: int, steps: int, rank: int, lr: float) -> tuple[Tensor, float]:
        """What `rank` should push that has taken `weights` [P] for `steps` steps; the update [P], and the mean loss."""
        weights = weights.to(self.device)
        update, losses = torch.zeros_like(weights), 0.0
        for step in range(first_step, first_step + steps):
            gradient, loss = self.gradient(weights, step, rank)
            update, weights, losses = update + gradient, weights - lr * gradient, losses + loss
        return update.cpu(), losses / steps

    def digest(self, first_step: int, steps: int, rank: int) -> str:
        """Of the samples of `steps` steps of `rank`: first the inputs and then the targets of each sample in turn."""
        found = hashlib.blake2b(digest_size=8)
        for step in range(first_step, first_step + steps):
            for sample in zip(*self.samples(step, rank), strict=True):
                for tensor in sample:
                    found.update(tensor.cpu().double().numpy().tobytes())
        return found.hexdigest()


def cuts(batch: int, workers: int, *, uneven: bool) -> list[int]:
    """Where the shards of a batch begin, and where the last one ends."""
    sizes = [(batch - rank + workers - 1) // workers for rank in range(workers)]
    if uneven and workers > 1 and batch % workers == 0:
        others = [rank for rank in reversed(range(workers)) if rank != 1]
        for taker in (others * 2)[: min(2, sizes[1] - 1)]:
            sizes[1], sizes[taker] = sizes[1] - 1, sizes[taker] + 1
    return [sum(sizes[:rank]) for rank in range(workers + 1)]


def points(seed: int, num_samples: int, terms: int) -> Tensor:
    """y = 2x + 1 and noise of 0.1, x uniform in (-1, 1): [samples, terms, 2]."""
    draw = random.Random(seed)
    values = []
    for _ in range(num_samples * terms):
        x = draw.uniform(-1.0, 1.0)
        values.append([x, 2.0 * x + 1.0 + draw.gauss(0.0, 0.1)])
    return torch.tensor(values, dtype=torch.float64).reshape(num_samples, terms, 2)
