"""A worker of an asynchronous run, and what the events at its server say of it.

A worker asks to start, takes some steps from the weights that come, and pushes the sum of their gradients. Which
weights it had, and which updates came in between, is known of a real run only from the events in the order in which the
server took them.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.config import Config
from distlab.data_parallel.buckets import Vectors
from distlab.measure.tensors import digest_of
from distlab.parameter_server.server import PUSH, START, Client, Event
from distlab.workload.data import Batches
from distlab.workload.model import Model
from distlab.workload.strategy import forward_backward


class Scheme(NamedTuple):
    name: str
    most: int  # steps between a fetch and its push
    staleness: int | None  # the bound, None where there is none


class Worker:
    """One worker's model and data, and what it did; `noted(step)` is called before each step."""

    def __init__(
        self, model: Model, config: Config, batches: Batches, rank: int, lr: float,
        noted: Callable[[int], None] = lambda step: None,  # noqa: ARG005
    ) -> None:  # fmt: skip
        self.model, self.vectors = model, Vectors(model.parameters())
        self.batches, self.rank, self.num_workers, self.lr, self.noted = batches, rank, config.world_size, lr, noted
        self.steps = 0
        self.samples: list[str] = []  # digests of those behind each push
        self._taken: list[Tensor] = []  # inputs and targets since the last push

    def train(self, client: Client, most: int) -> None:
        """Work until the server has no more steps to grant; the weights are the final ones then."""
        update = torch.zeros_like(self.vectors.weights)
        while granted := self.fetch(client, most):
            loss = self.accumulate(update, granted)
            client.push(len(self.samples), update, loss)
        client.finish(self.vectors.weights)

    def fetch(self, client: Client, most: int) -> int:
        """Take the server's weights, for up to `most` steps; returns how many it grants."""
        return client.start(most, self.vectors.weights)

    def accumulate(self, update: Tensor, steps: int) -> float:
        """Fill `update` with the sum of the gradients of `steps` steps, and return the mean loss.

        Each gradient is taken at weights that those before it have moved.
        """
        update.zero_()
        losses = []
        for _ in range(steps):
            self.noted(self.steps)
            losses.append(self.backward())
            update += self.vectors.gradients
            self.vectors.weights.add_(self.vectors.gradients, alpha=-self.lr)
            self.steps += 1
        self.samples.append(digest_of(self._taken))
        self._taken = []
        return sum(losses) / len(losses)

    def backward(self) -> float:
        """The gradient of this worker's next samples, weighed by their share of the batch; returns their mean loss."""
        self.vectors.zero()
        microbatches, summed = self.batches.dealt(self.steps, self.rank, self.num_workers), 0.0
        for index, part in enumerate(microbatches):
            summed += forward_backward(self.model, part, index).item()
            self._taken += part[:2]
        return summed / sum(part.share * part.targets.numel() for part in microbatches)


class Audit(NamedTuple):
    lead: int  # the most finished steps that any worker was ahead of the slowest at a start
    staleness: list[int]  # of each push: updates of others since its worker took the weights
    steps: dict[int, list[int]]  # of each worker's pushes
    granted: int  # steps that the server let anybody begin
    wrong_numbers: int  # pushes that are not their worker's next


def audit(seen: Iterable[Event], workers: Iterable[int]) -> Audit:
    """Read the events of `workers` from the first on."""
    clocks = dict.fromkeys(workers, 0)
    steps: dict[int, list[int]] = {worker: [] for worker in clocks}
    staleness: list[int] = []
    lead, granted, wrong_numbers, taken_at = 0, 0, 0, {}
    for event in seen:
        worker = event.worker
        if event.kind == START:
            lead = max(lead, clocks[worker] - min(clocks.values()))
            taken_at[worker] = len(staleness)
            granted += event.steps
        elif event.kind == PUSH:
            staleness.append(len(staleness) - taken_at[worker])
            steps[worker].append(event.steps)
            wrong_numbers += event.number != len(steps[worker])
            clocks[worker] += event.steps
        else:
            del clocks[worker]
    return Audit(lead, staleness, steps, granted, wrong_numbers)
