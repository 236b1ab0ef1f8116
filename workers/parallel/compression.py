"""Gradients that are sent as less than they are, and still summed: what stands in for the all_reduce of a bucket.

A compressor C turns a gradient into a message of fewer bytes. It saves nothing unless the message itself is what
travels, and the sum of messages is what all ranks can read (a compressed gradient that is turned back into a dense
tensor before it is sent saves no byte). So each method says how its messages are summed: casts, codes on one scale,
values at shared places and factors of low rank by an all_reduce, whose bytes do not grow with N; top-k and signs, which
no all_reduce could add, by an all_gather, whose do.

What C leaves out is not lost but late (error feedback; Seide et al. 2014; Stich et al. 2018, "Sparsified SGD with
memory"):

    values   = e + g            the residual of the steps before, and this step's gradient
    sent     = C(values)
    e        = values - sent    kept by the rank for its next step

Summed over the ranks, sent + residuals after = gradients + residuals before, at every step: the invariant of the proof.
Gradients here are already weighed by each rank's share of the batch, so the sum over ranks of what is sent is the mean,
and none is divided.

The siblings: casting.py, quantised.py, sparse.py, sign.py and lowrank.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Handle:
    """A sum on its way; after `wait()` it stands in the bucket."""

    wait: Callable[[], None]


class Compressor(ABC):
    """An AllReduce for one bucket that sends less: `compressor(bucket).wait()` leaves the sum of what all ranks sent in
    `bucket`.

    Args:
        group: the ranks that sum.
        feedback: keep what was not sent for the next step, in the dtype of the bucket: S bytes more on each rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, feedback: bool) -> None:
        self.group = group
        self.feedback = feedback
        self.residual: Tensor | None = None  # e, flat as the bucket; there after the first step

    @abstractmethod
    def __call__(self, bucket: Tensor) -> Handle:
        """Begin to sum; until `wait()` is over nobody may touch `bucket`."""

    def with_residual(self, bucket: Tensor) -> Tensor:
        """e + g, in the memory of the residual; the bucket itself without feedback."""
        if not self.feedback:
            return bucket
        if self.residual is None:
            self.residual = torch.zeros_like(bucket)
        return self.residual.add_(bucket)


class OneMessage(Compressor):
    """A compressor whose ranks send once: it encodes, and while the message is on its way it finds what was left
    out."""

    def __call__(self, bucket: Tensor) -> Handle:
        values = self.with_residual(bucket)
        message = self.encode(values)
        work, received = self.exchange(message)
        if self.feedback:
            self.take_out(message, values)

        def end() -> None:
            work.wait()
            self.decode(received, bucket)

        return Handle(end)

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """The message for `values`, flat and of one size on all ranks."""

    @abstractmethod
    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        """Send it: a handle to wait for, and the tensor that then holds what `decode` reads."""

    @abstractmethod
    def take_out(self, message: Tensor, values: Tensor) -> None:
        """Leave in `values` what this rank's message does not say."""

    @abstractmethod
    def decode(self, received: Tensor, bucket: Tensor) -> None:
        """Write the sum of all ranks' messages into `bucket`."""

    def all_reduce(self, message: Tensor) -> tuple[Any, Tensor]:
        """An `exchange` for messages that can be added: received is their sum, beside this rank's own."""
        total = message.clone()
        return dist.all_reduce(total, group=self.group, async_op=True), total

    def all_gather(self, message: Tensor) -> tuple[Any, Tensor]:
        """An `exchange` for those that cannot: received is [N, message], in rank order, so that all ranks add alike."""
        received = message.new_empty(self.group.size(), len(message))
        return dist.all_gather(list(received), message, group=self.group, async_op=True), received
