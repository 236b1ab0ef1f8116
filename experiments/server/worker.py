"""A worker of an asynchronous run, and the recorder of what happens at its server.

A worker asks to start, takes some steps from the weights that come, and pushes the sum of their gradients. Which
weights it had, and which updates came in between, is known of a real run only if somebody writes the events down in the
order in which the server took them.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.collectives.phases import phase
from distlab.config import Config
from distlab.data_parallel.buckets import Vectors
from distlab.parameter_server.server import LEAVE, PUSH, START, Client
from distlab.workload.data import Batches
from distlab.workload.model import Model


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
        self.samples: list[str] = []  # digests of those behind each push
        self._taken = hashlib.blake2b(digest_size=8)  # samples since the last fetch

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
            if self.noted is not None:
                self.noted(self.steps)
            losses.append(self.backward())
            update += self.vectors.gradients
            self.vectors.weights.add_(self.vectors.gradients, alpha=-self.lr)
            self.steps += 1
        self.samples.append(self._taken.hexdigest())
        self._taken = hashlib.blake2b(digest_size=8)
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


class ServerEvent(NamedTuple):
    """An event at the server."""

    kind: str  # START, PUSH or LEAVE
    worker: int
    steps: int  # granted, delivered or lost
    number: int = 0  # of a push: its worker's first is 1
    loss: float = 0.0  # of a push: the mean that its worker computed


class Recorder:
    """The events at a server of `workers` in the order in which it took them, as its `Witness`."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.seen: list[ServerEvent] = []
        self.finished = dict.fromkeys(workers, 0)  # steps by worker, of those who left too
        self._granted: dict[int, int] = {}

    def started(self, worker: int, steps: int) -> None:
        """`worker` has the weights of now, for `steps` steps."""
        self.seen.append(ServerEvent(START, worker, steps))
        self._granted[worker] = steps

    def pushed(self, worker: int, number: int, update: Tensor, loss: float) -> None:  # noqa: ARG002
        """An update of `worker` was applied."""
        steps = self._granted.pop(worker)
        self.seen.append(ServerEvent(PUSH, worker, steps, number, loss))
        self.finished[worker] += steps

    def left(self, worker: int) -> None:
        """`worker` is gone, and what it had under way with it."""
        self.seen.append(ServerEvent(LEAVE, worker, self._granted.pop(worker, 0)))


class Audit(NamedTuple):
    """What the events say of the rules."""

    lead: int  # the most finished steps that any worker was ahead of the slowest at a start
    staleness: list[int]  # of each push: updates of others since its worker took the weights
    steps: dict[int, list[int]]  # of each worker's pushes
    granted: int  # steps that the server let anybody begin
    wrong_numbers: int  # pushes that are not their worker's next


def audit(seen: Iterable[ServerEvent], workers: Iterable[int]) -> Audit:
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
