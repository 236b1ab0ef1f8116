"""Gradient compression: AllReduces for a bucket that send fewer bytes than the bucket has, and still sum.

A compressor C turns a gradient into a smaller message. It saves bytes only if the message itself is sent and the sum of
messages can be decoded on every rank (a compressed gradient that becomes a dense tensor again before it is sent saves
nothing). So each method defines how messages are summed. Casts, codes with a common scale, values at common positions
and low-rank factors use an all_reduce, whose bytes do not grow with N. Top-k messages cannot be added, so they use an
all_gather, whose bytes do.

C's error is not lost but sent later (error feedback; Seide et al. 2014; Stich et al. 2018, "Sparsified SGD with
memory"):

    values   = e + g            the residual of earlier steps, plus this step's gradient
    sent     = C(values)
    e        = values - sent    stays on the rank for its next step

Summed over the ranks, sent + residuals after = gradients + residuals before, at every step: the invariant of the proof.
Gradients here are already weighted by each rank's share of the batch, so the sum of what is sent is the mean, and
nothing is divided.

The compressors below send 16 bits, 8 bits or a few numbers; powersgd.py sends two thin factors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.collectives.phases import is_observed, observed_steps
from distlab.techniques.collectives.point_to_point import GroupMessage, Pending, Steps


@dataclass(frozen=True)
class Handle:
    """A sum that is still running; after `wait()` the bucket has the result."""

    wait: Callable[[], None]


class Compressor(ABC):
    """An AllReduce for one bucket that sends less: after `compressor(bucket).wait()`, `bucket` has the sum of all
    ranks' messages.

    Args:
        group: the ranks that sum.
        feedback: keep the unsent part for the next step, in the dtype of the bucket: S bytes more on each rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, feedback: bool) -> None:
        self.group = group
        self.feedback = feedback
        self.residual: Tensor | None = None  # e, flat like the bucket; set in the first step

    @abstractmethod
    def __call__(self, bucket: Tensor) -> Handle:
        """Begin to sum; `bucket` must not be used until `wait()` returns."""

    def with_residual(self, bucket: Tensor) -> Tensor:
        """Return e + g, in the memory of the residual; without feedback, the bucket itself."""
        if not self.feedback:
            return bucket
        if self.residual is None:
            self.residual = torch.zeros_like(bucket)
        return self.residual.add_(bucket)


class OneMessage(Compressor):
    """A compressor with one message per step; it computes the residual while the message is on its way."""

    def __call__(self, bucket: Tensor) -> Handle:
        before = self.residual.clone() if is_observed() and self.residual is not None else 0
        values = self.with_residual(bucket)
        message = self.encode(values)
        work, received = self.exchange(message)
        if self.feedback:
            self.subtract_sent(message, values)

        def steps() -> Steps:
            yield GroupMessage(work, "a compressed sum of", dist.get_backend(self.group))
            self.decode(received, bucket)

        if not (is_observed() and self.feedback):
            return Handle(Pending(steps()).wait)
        ranks, sent = dist.get_process_group_ranks(self.group), bucket + before - values
        return Handle(Pending(observed_steps("all_reduce", ranks, sent, bucket, steps(), values)).wait)

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Return the message for `values`, flat and of the same size on all ranks."""

    @abstractmethod
    def subtract_sent(self, message: Tensor, values: Tensor) -> None:
        """Subtract this rank's message from `values`, which leaves the residual."""

    @abstractmethod
    def decode(self, received: Tensor, bucket: Tensor) -> None:
        """Write the sum of all ranks' messages into `bucket`."""

    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        """Begin to send the message; return a handle and the tensor with the sum of messages, for `decode`."""
        total = message.clone()
        return dist.all_reduce(total, group=self.group, async_op=True), total


# 16 bits per number: half of float32's bytes, for any number of ranks.
#
# fp16 has 11 bits of precision and ends at 65504. A sum must not exceed that on any hop, so each rank sends at most
# 1/(N+1) of the largest number (with 1/N, rounding could still reach infinity); the excess stays in the residual, if
# there is one. Sums are rounded to 16 bits at each hop too, and no residual records that rounding: so the result is
# exact up to (N-1) roundings, not to the bit.


class Cast(OneMessage):
    """Sums in fp16, whatever the dtype of the bucket; 2(N-1)/N·2n bytes for n numbers."""

    def encode(self, values: Tensor) -> Tensor:
        limit = torch.finfo(torch.float16).max / (self.group.size() + 1)
        return values.half().clamp_(-limit, limit)

    def subtract_sent(self, message: Tensor, values: Tensor) -> None:
        values.sub_(message.to(values.dtype))

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.copy_(received)


# 8 bits per number: codes with a common scale, which an all_reduce can add.
#
# Codes with different scales cannot be added, so all ranks use one scale per bucket: from the largest magnitude on any
# rank, found by an all_reduce MAX of one number. The sum also has to fit into 8 bits: with codes up to 127 two ranks
# already reach 254, which int8 wraps to -2. So a code is at most L = 127 // N, and N of them are at most 127.
#
# Why not wider codes? Bytes per rank for n numbers, by the way of summing:
#
#                                         N = 2    4       8      levels
#     codes up to 127 // N, all_reduce    1.0 n    1.5 n   1.75 n  +-63, +-31, +-15       this file
#     codes up to 127, all_gather         1.0 n    3.0 n   7.0 n   +-127
#     codes up to 127, int16 all_reduce   2.0 n    3.0 n   3.5 n   +-127
#     float32                             4.0 n    6.0 n   7.0 n
#
# The first sends least for every N above 2 and no more at 2; the residual sends later what its coarser codes drop.
# Rounding is stochastic (Alistarh et al. 2017, "QSGD", section 3): up with a probability equal to the remainder, so
# that a code is right on average and small gradients are not always rounded to zero.


class Quantised(OneMessage):
    """int8 codes: value = code x scale, scale = largest magnitude / (127 // N). Each rank has a different `seed`.

    A bucket of zeros stays zero: a scale below the dtype's normal numbers is replaced by 1, and all codes are 0 then.
    """

    def __init__(self, group: dist.ProcessGroup, seed: int, *, feedback: bool) -> None:
        super().__init__(group, feedback=feedback)
        self.levels = 127 // group.size()
        self.scale = 1.0
        self._generator = torch.Generator().manual_seed(seed)

    def encode(self, values: Tensor) -> Tensor:
        self.scale = self.shared_scale(values)
        dtype = torch.promote_types(values.dtype, torch.float32)  # 16 bits have too few digits for code and fraction
        codes = torch.rand(values.shape, generator=self._generator, dtype=dtype).to(values.device)
        codes.add_(values, alpha=1 / self.scale).floor_().clamp_(-self.levels, self.levels)
        return codes.to(torch.int8)

    def shared_scale(self, values: Tensor) -> float:
        """Return the scale, equal on every rank. Encoding needs it, so this short all_reduce is blocking."""
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high).to(torch.promote_types(values.dtype, torch.float32))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        scale = largest.item() / self.levels
        return scale if not scale < torch.finfo(values.dtype).tiny else 1.0

    def subtract_sent(self, message: Tensor, values: Tensor) -> None:
        values.sub_(message.to(values.dtype), alpha=self.scale)

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.copy_(received).mul_(self.scale)


def rank_seed(seed: int, rank: int) -> int:
    return 1_000_003 * seed + rank


# Sparse gradients: the largest numbers (top-k), or some at random positions that are equal on all ranks (random-k).
#
# Top-k (Aji and Heafield 2017; Stich et al. 2018): each rank's largest numbers have other positions, so 4 bytes of
# position are sent with every value, and no all_reduce can add them. An all_gather sends (N-1)·8k bytes in float32,
# which grows with N, where dense sums stay under 2·4n. It stops paying at N·8k = 8n: N = 1/ratio.
#
# Random-k: all ranks use one seed (with different seeds, sums would mix numbers of different positions), so positions
# are not sent, and an all_reduce adds the k values: 2(N-1)/N·4k bytes, for every N. A number is sent with probability
# k/n, so the expected message is k/n of the gradient. Without error feedback it is multiplied by n/k, which makes it
# unbiased. With error feedback it must not be: the unsent part follows later anyway, and a message n/k times too large
# would be repeated at every step (the proof of Stich et al. needs a contraction, |x - C(x)| <= |x|, which the scaled
# one is not).

SAMPLED = 100  # one number in 100 is sampled to estimate the threshold
BLOCK = 1 << 16  # numbers that fit into a core's cache with their magnitudes


def num_kept(numel: int, ratio: float) -> int:
    """Return k, at least 1."""
    return max(1, round(ratio * numel))


class TopK(OneMessage):
    """Sends the k = ratio·n numbers of largest magnitude; among equal ones the first. The message is k int32 positions
    and k values, as bytes."""

    def __init__(self, group: dist.ProcessGroup, ratio: float, *, feedback: bool) -> None:
        super().__init__(group, feedback=feedback)
        self.ratio = ratio

    def encode(self, values: Tensor) -> Tensor:
        places = largest(values, num_kept(len(values), self.ratio))
        return torch.cat([places.int().view(torch.uint8), values[places].view(torch.uint8)])

    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        """Return all ranks' messages [N, message], in rank order, so that every rank adds in the same order."""
        received = message.new_empty(self.group.size(), len(message))
        return dist.all_gather(list(received), message, group=self.group, async_op=True), received

    def subtract_sent(self, message: Tensor, values: Tensor) -> None:
        places, _ = read_sparse(message, values.dtype)
        values[places] = 0

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.zero_()
        for message in received:
            places, values = read_sparse(message, bucket.dtype)
            bucket.index_add_(0, places, values)


def read_sparse(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    end = len(message) // (4 + dtype.itemsize) * 4
    return message[:end].clone().view(torch.int32), message[end:].clone().view(dtype)  # a copy starts where views may


def largest(values: Tensor, k: int) -> Tensor:
    """Return the positions of the k numbers of largest magnitude, ascending above the k-th; of equal ones the first.

    Exact, and takes a sixth of the time of torch.topk over all: one number in a hundred is sampled to estimate a
    threshold that about 1.25 k exceed, all are compared with it piece by piece, and only those that exceed it are
    ranked. If fewer than k exceed it, all are ranked.
    """
    sample = values[::SAMPLED].abs()
    guess = torch.topk(sample, min(len(sample), k * len(sample) // len(values) * 5 // 4 + 50)).values[-1]
    passed = [
        (piece.abs() >= guess).nonzero().flatten() + index * BLOCK for index, piece in enumerate(values.split(BLOCK))
    ]
    places = torch.cat(passed)
    if len(places) < k:
        places = torch.arange(len(values), device=values.device)
    magnitudes = values[places].abs()
    kth = torch.topk(magnitudes, k).values[-1]
    above, equal = places[magnitudes > kth], places[magnitudes == kth]
    return torch.cat([above, equal[: k - len(above)]])


class RandomK(OneMessage):
    """Sends k = ratio·n numbers at random positions, new ones each step, which every rank draws from the same `seed`.
    The message is k values."""

    def __init__(self, group: dist.ProcessGroup, ratio: float, seed: int, *, feedback: bool) -> None:
        super().__init__(group, feedback=feedback)
        self.ratio = ratio
        self._generator = torch.Generator().manual_seed(seed)

    def encode(self, values: Tensor) -> Tensor:
        self.places = draw_places(len(values), num_kept(len(values), self.ratio), self._generator).to(values.device)
        return values[self.places]

    def subtract_sent(self, message: Tensor, values: Tensor) -> None:  # noqa: ARG002  the places are here as well
        values[self.places] = 0

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.zero_()
        bucket[self.places] = received if self.feedback else received * (len(bucket) / len(received))
        del self.places  # 8 bytes each; the next step draws new ones


def draw_places(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k different positions below `numel`, each set of k equally probable.

    Shuffling 10M positions would take a quarter of a second; so positions are drawn with repetition until k are
    different.
    """
    if 4 * k > numel:
        return torch.randperm(numel, generator=generator)[:k]
    places = torch.empty(0, dtype=torch.int64)
    while len(places) < k:
        drawn = torch.randint(numel, (k + k // 4 + 1,), generator=generator)
        places = torch.cat([places, drawn]).unique()
    return places[torch.randperm(len(places), generator=generator)[:k]]
