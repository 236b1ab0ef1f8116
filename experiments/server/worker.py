"""A worker of an asynchronous run: ask to start, take some steps from the weights that come, push what they come to.

It notes what it had and what it gave: by that one process holds it to its samples and to its gradients (replay.py).
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.server.witness import checksum
from workers.config import Config
from workers.parallel.phases import phase
from workers.parallel.serving import Client
from workers.parallel.vectors import Vectors
from workers.workload.data import Batches
from workers.workload.model import Model


class Scheme(NamedTuple):
    """One way of being asynchronous."""

    name: str
    most: int  # steps between a fetch and its push
    staleness: int | None  # the bound, None where there is none


class Worker:
    """One worker's model and data, and what it did; `noted(step)`, if given, is called before each step."""

    def __init__(
        self,
        model: Model,
        config: Config,
        batches: Batches,
        rank: int,
        lr: float,
        noted: Callable[[int], None] | None = None,
    ) -> None:
        self.model, self.vectors = model, Vectors(model.parameters())
        self.batches, self.rank, self.num_workers, self.lr, self.noted = batches, rank, config.world_size, lr, noted
        self.steps = 0
        self.fetched: list[float] = []  # checksums of the weights that it began from, a push each
        self.sent: list[float] = []  # and of the updates pushed
        self.samples: list[str] = []  # and digests of the samples behind them
        self._taken = hashlib.blake2b(digest_size=8)  # samples since the last fetch

    def train(self, client: Client, most: int) -> None:
        """Work until the server has no more steps to grant; the weights are the final ones then."""
        update = torch.zeros_like(self.vectors.weights)
        while granted := self.fetch(client, most):
            self.fetched.append(checksum(self.vectors.weights))
            loss = self.accumulate(update, granted)
            self.note(update)
            client.push(len(self.sent), update, loss)
        client.finish(self.vectors.weights)

    def fetch(self, client: Client, most: int) -> int:
        """Take the server's weights, for up to `most` steps; returns how many it grants."""
        return client.start(most, self.vectors.weights)

    def note(self, update: Tensor) -> None:
        """Write down what is about to be pushed, and the samples that it is made of."""
        self.sent.append(checksum(update))
        self.samples.append(self._taken.hexdigest())
        self._taken = hashlib.blake2b(digest_size=8)

    def accumulate(self, update: Tensor, steps: int) -> float:
        """Fill `update` with the sum of the gradients of `steps` steps, and return the mean loss.

        Each gradient is taken at weights that those before it have moved.
        """
        update.zero_()
        losses = []
        for _ in range(steps):
            if self.noted is not None:
                self.noted(self.steps)
            losses.append(self.backward())
            update += self.vectors.gradients
            self.vectors.weights.add_(self.vectors.gradients, alpha=-self.lr)
            self.steps += 1
        return sum(losses) / len(losses)

    def backward(self) -> float:
        """The gradient of this worker's next samples, weighed by their share of the batch; returns their mean loss."""
        self.vectors.zero()
        microbatches = self.batches.dealt(self.steps, self.rank, self.num_workers)
        summed = 0.0
        for index, (inputs, targets, share) in enumerate(microbatches):
            with phase("forward", str(index)):
                loss = self.model(inputs, targets) * share
            with phase("backward", str(index)):
                loss.backward()
            summed += loss.item()
            self.take_note(inputs, targets)
        return summed / sum(part.share * part.targets.numel() for part in microbatches)

    def take_note(self, inputs: Tensor, targets: Tensor) -> None:
        """Add samples to the digest, one after the other, so that it does not depend on how they were split."""
        for pair in zip(inputs.cpu(), targets.cpu(), strict=True):
            for tensor in pair:
                self._taken.update(tensor.double().numpy().tobytes())
