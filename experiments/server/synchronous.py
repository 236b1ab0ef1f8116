"""The server in step with its workers: sums and counts in, weights out.

A worker's message is its sum over its own samples and how many terms it summed, never their mean: shards may differ in size, and
whoever adds up means weighs a small shard's samples more (the first lesson's 8, 6, 9 and 9). The server adds in the order of ranks, not
of arrival, since a sum of floats depends on it; it alone has an optimizer.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from workers.config import Config
from workers.parallel.peers import Peers
from workers.parallel.phases import phase
from workers.parallel.vectors import Vectors
from workers.strategies.replica import Replica
from workers.workload.data import Microbatch
from workers.workload.model import Model

SERVER = 0


class Alone:
    """`Gradients` that stay on this rank, in one flat vector."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def zero(self) -> None:
        self.vectors.zero()

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002  nothing is sent
        return nullcontext()

    def finish(self) -> None:
        """Nobody else is asked."""


class Served(Replica):
    """A Strategy: a worker's replica, and on rank 0 the server beside it."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        self.vectors = Vectors(model.parameters())
        super().__init__(model, config, Alone(self.vectors))
        self.peers = Peers(group)

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Sum over this worker's samples; on rank 0 the gradient then is the mean over all."""
        total = super().backward([microbatch._replace(share=1.0) for microbatch in microbatches])
        count = torch.tensor([sum(part.targets.numel() for part in microbatches)], device=self.vectors.gradients.device)
        with phase("all_reduce"):
            self.send(count) if self.peers.rank else self.collect(count)
        return total * microbatches[0].share

    def send(self, count: Tensor) -> None:
        """A worker's message: how many terms, and the sum of their gradients."""
        _, sent = self.peers.post(self.peers.new_tag(), sends=[(SERVER, count), (SERVER, self.vectors.gradients)])
        for message in sent:
            message.wait()

    def collect(self, count: Tensor) -> None:
        """The server's side: add up all sums and all counts, and divide once."""
        tag, gradients = self.peers.new_tag(), self.vectors.gradients
        theirs, arrived = torch.empty_like(count), torch.empty_like(gradients)
        for worker in range(1, self.peers.world_size):
            received, _ = self.peers.post(tag, receives=[(worker, theirs), (worker, arrived)])
            for message in received:
                message.wait()
            count += theirs
            gradients += arrived
        gradients /= count

    def update(self) -> None:
        """The server steps; everyone gets its weights."""
        others = range(1, self.peers.world_size)
        tag = self.peers.new_tag()
        if self.peers.rank == SERVER:
            super().update()
            _, messages = self.peers.post(tag, sends=[(worker, self.vectors.weights) for worker in others])
        else:
            messages, _ = self.peers.post(tag, receives=[(SERVER, self.vectors.weights)])
        with phase("wait"):
            for message in messages:
                message.wait()
