"""Gradients that are sent as less than they are, and still summed: what stands in for the all_reduce of a bucket.

A compressor C turns a gradient into a message of fewer bytes. It saves nothing unless the message itself is what
travels, and the sum of messages is what all ranks can read (a compressed gradient that is turned back into a dense
tensor before it is sent saves no byte). So each method says how its messages are summed: casts, codes on one scale,
values at shared places and factors of low rank by an all_reduce, whose bytes do not grow with N; top-k, which no
all_reduce could add, by an all_gather, whose do.

What C leaves out is not lost but late (error feedback; Seide et al. 2014; Stich et al. 2018, "Sparsified SGD with
memory"):

    values   = e + g            the residual of the steps before, and this step's gradient
    sent     = C(values)
    e        = values - sent    kept by the rank for its next step

Summed over the ranks, sent + residuals after = gradients + residuals before, at every step: the invariant of the proof.
Gradients here are already weighed by each rank's share of the batch, so the sum over ranks of what is sent is the mean,
and none is divided.

The compressors below send 16 bits, 8 bits or a few numbers; powersgd.py sends two thin factors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.techniques.collectives.phases import seen, watched
from distlab.techniques.collectives.point_to_point import GroupMessage, Pending, Steps


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
        before = self.residual.clone() if watched() and self.residual is not None else 0
        values = self.with_residual(bucket)
        message = self.encode(values)
        work, received = self.exchange(message)
        if self.feedback:
            self.take_out(message, values)

        def steps() -> Steps:
            yield GroupMessage(work, "a compressed sum of", dist.get_backend(self.group))
            self.decode(received, bucket)

        if not (watched() and self.feedback):
            return Handle(Pending(steps()).wait)
        ranks, sent = dist.get_process_group_ranks(self.group), bucket + before - values
        return Handle(Pending(seen("all_reduce", ranks, sent, bucket, steps(), values)).wait)

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """The message for `values`, flat and of one size on all ranks."""

    @abstractmethod
    def take_out(self, message: Tensor, values: Tensor) -> None:
        """Leave in `values` what this rank's message does not say."""

    @abstractmethod
    def decode(self, received: Tensor, bucket: Tensor) -> None:
        """Write the sum of all ranks' messages into `bucket`."""

    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        """Send it: a handle to wait for, and the tensor that then holds what `decode` reads: the sum of messages."""
        total = message.clone()
        return dist.all_reduce(total, group=self.group, async_op=True), total


# 16 bits on the wire: half of float32's bytes, whatever the number of ranks.
#
# fp16 has 11 bits of precision, and ends at 65504. A sum must not leave that range on any hop, so each rank sends at
# most 1/(N+1) of the largest number (an N-th each could still be rounded up to infinity): what is above stays in the
# residual, where there is one. Sums are added in 16 bits too, hop by hop, and that rounding is nobody's residual: it is
# why this is exact up to (N-1) roundings and not to the bit.


class Cast(OneMessage):
    """Sums in fp16 whatever the bucket is in; 2(N-1)/N·2n bytes for n numbers."""

    def encode(self, values: Tensor) -> Tensor:
        limit = torch.finfo(torch.float16).max / (self.group.size() + 1)
        return values.half().clamp_(-limit, limit)

    def take_out(self, message: Tensor, values: Tensor) -> None:
        values.sub_(message.to(values.dtype))

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.copy_(received)


# 8 bits on the wire: codes on one scale, which an all_reduce can add.
#
# Codes of ranks with scales of their own cannot be added, so a bucket has one scale for all ranks: the largest
# magnitude that any of them holds, found by an all_reduce MAX of one number. And the sum has to fit into 8 bits as
# well: with codes up to 127 two ranks already reach 254, which int8 wraps to -2. So a code is at most L = 127 // N,
# and N of them are at most 127.
#
# Why not wider? Bytes a rank sends for n numbers, by what is done about the sum:
#
#                                         N = 2    4       8      levels
#     codes up to 127 // N, all_reduce    1.0 n    1.5 n   1.75 n  +-63, +-31, +-15       this file
#     codes up to 127, all_gather         1.0 n    3.0 n   7.0 n   +-127
#     codes up to 127, int16 all_reduce   2.0 n    3.0 n   3.5 n   +-127
#     float32                             4.0 n    6.0 n   7.0 n
#
# The first sends least for every N above 2 and no more at 2; what its coarser codes leave out, the residual brings
# later. Rounding is stochastic (Alistarh et al. 2017, "QSGD", section 3): up with the probability of the remainder,
# so that a code is right on average and small gradients are not always rounded to nothing.


class Quantised(OneMessage):
    """Codes of int8: value = code x scale, scale = largest magnitude / (127 // N). `seed` is a rank's own.

    A bucket of zeros gives zeros: a scale too small for its dtype's normal numbers is taken as 1, and all codes are 0
    then.
    """

    def __init__(self, group: dist.ProcessGroup, seed: int, *, feedback: bool) -> None:
        super().__init__(group, feedback=feedback)
        self.levels = 127 // group.size()
        self.scale = 1.0
        self._generator = torch.Generator().manual_seed(seed)

    def encode(self, values: Tensor) -> Tensor:
        self.scale = self.shared_scale(values)
        dtype = torch.promote_types(values.dtype, torch.float32)  # 16 bits hold no fraction beside a code
        codes = torch.rand(values.shape, generator=self._generator, dtype=dtype).to(values.device)
        codes.add_(values, alpha=1 / self.scale).floor_().clamp_(-self.levels, self.levels)
        return codes.to(torch.int8)

    def shared_scale(self, values: Tensor) -> float:
        """The same on every rank. This short all_reduce is waited for: no code can be written before."""
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high).to(torch.promote_types(values.dtype, torch.float32))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        scale = largest.item() / self.levels
        return scale if not scale < torch.finfo(values.dtype).tiny else 1.0

    def take_out(self, message: Tensor, values: Tensor) -> None:
        values.sub_(message.to(values.dtype), alpha=self.scale)

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.copy_(received).mul_(self.scale)


def rank_seed(seed: int, rank: int) -> int:
    return 1_000_003 * seed + rank


# A few of many numbers: the largest (top-k), or some that all ranks draw alike (random-k).
#
# Top-k (Aji and Heafield 2017; Stich et al. 2018): every rank's largest lie elsewhere, so places travel beside
# values, 4 bytes each, and no all_reduce can add them: all_gather, (N-1)·8k bytes in float32, which grows with N
# where dense sums stay under 2·4n. It stops paying at N·8k = 8n: N = 1/ratio.
#
# Random-k: one seed for all ranks (with a seed each, sums would add numbers of different places), so places are not
# sent at all, and the k values are added by an all_reduce: 2(N-1)/N·4k bytes, for every N. A number is sent with
# probability k/n, so the expectation of what is sent is k/n of the gradient. Without error feedback it is multiplied
# by n/k, which makes it unbiased. With error feedback it is not: all that is left out comes later anyway, and n/k
# times too much would be sent now, over and over (the proof of Stich et al. needs a contraction, |x - C(x)| <= |x|,
# which the scaled one is not).

SAMPLED = 100  # one number in so many is looked at to guess the threshold
PIECE = 1 << 16  # numbers that fit into a core's cache with their magnitudes


def num_kept(numel: int, ratio: float) -> int:
    """k, at least one."""
    return max(1, round(ratio * numel))


class TopK(OneMessage):
    """The k = ratio·n numbers of largest magnitude, of equal ones the first. The message is k int32 and k values, as
    bytes."""

    def __init__(self, group: dist.ProcessGroup, ratio: float, *, feedback: bool) -> None:
        super().__init__(group, feedback=feedback)
        self.ratio = ratio

    def encode(self, values: Tensor) -> Tensor:
        places = largest(values, num_kept(len(values), self.ratio))
        return torch.cat([places.int().view(torch.uint8), values[places].view(torch.uint8)])

    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        """The messages of all [N, message], in rank order, so that all ranks add alike."""
        received = message.new_empty(self.group.size(), len(message))
        return dist.all_gather(list(received), message, group=self.group, async_op=True), received

    def take_out(self, message: Tensor, values: Tensor) -> None:
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
    """The places of the k numbers of largest magnitude, ascending among those above the k-th; of equals the first are
    taken.

    Exact, and a sixth of the time of torch.topk over all: one number in a hundred is looked at to guess a threshold
    that a quarter more than k pass, all are compared with it piece by piece, and only those that pass are ranked. If
    fewer than k pass, all are ranked.
    """
    sample = values[::SAMPLED].abs()
    guess = torch.topk(sample, min(len(sample), k * len(sample) // len(values) * 5 // 4 + 50)).values[-1]
    passed = [
        (piece.abs() >= guess).nonzero().flatten() + index * PIECE for index, piece in enumerate(values.split(PIECE))
    ]
    places = torch.cat(passed)
    if len(places) < k:
        places = torch.arange(len(values), device=values.device)
    magnitudes = values[places].abs()
    kth = torch.topk(magnitudes, k).values[-1]
    above, equal = places[magnitudes > kth], places[magnitudes == kth]
    return torch.cat([above, equal[: k - len(above)]])


class RandomK(OneMessage):
    """k = ratio·n numbers, at places that every rank draws from the same `seed`, others at each step. The message is k
    values."""

    def __init__(self, group: dist.ProcessGroup, ratio: float, seed: int, *, feedback: bool) -> None:
        super().__init__(group, feedback=feedback)
        self.ratio = ratio
        self._generator = torch.Generator().manual_seed(seed)

    def encode(self, values: Tensor) -> Tensor:
        self.places = draw_places(len(values), num_kept(len(values), self.ratio), self._generator).to(values.device)
        return values[self.places]

    def take_out(self, message: Tensor, values: Tensor) -> None:  # noqa: ARG002  the places are here as well
        values[self.places] = 0

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.zero_()
        bucket[self.places] = received if self.feedback else received * (len(bucket) / len(received))
        del self.places  # 8 bytes each, and the next step draws others


def draw_places(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """k different places below `numel`, each set of k as probable as any other.

    A shuffle of all would cost a quarter of a second for 10M; so places are drawn with repetition, until there are k
    different ones, and k of these are kept.
    """
    if 4 * k > numel:
        return torch.randperm(numel, generator=generator)[:k]
    places = torch.empty(0, dtype=torch.int64)
    while len(places) < k:
        more = torch.randint(numel, (k + k // 4 + 1,), generator=generator)
        places = torch.cat([places, more]).unique()
    return places[torch.randperm(len(places), generator=generator)[:k]]
