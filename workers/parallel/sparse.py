"""A few of many numbers: the largest (top-k), or some that all ranks draw alike (random-k).

Top-k (Aji and Heafield 2017; Stich et al. 2018): every rank's largest lie elsewhere, so places travel beside values, 4
bytes each, and no all_reduce can add them: all_gather, (N-1)·8k bytes in float32, which grows with N where dense sums
stay under 2·4n. It stops paying at N·8k = 8n: N = 1/ratio.

Random-k: one seed for all ranks (with a seed each, sums would add numbers of different places), so places are not sent
at all, and the k values are added by an all_reduce: 2(N-1)/N·4k bytes, for every N. A number is sent with probability
k/n, so the expectation of what is sent is k/n of the gradient. Without error feedback it is multiplied by n/k, which
makes it unbiased. With error feedback it is not: all that is left out comes later anyway, and n/k times too much would
be sent now, over and over (the proof of Stich et al. needs a contraction, |x - C(x)| <= |x|, which the scaled one is
not).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.compression import OneMessage

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
        return self.all_gather(message)

    def take_out(self, message: Tensor, values: Tensor) -> None:
        places, _ = read(message, values.dtype)
        values[places] = 0

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.zero_()
        for message in received:
            places, values = read(message, bucket.dtype)
            bucket.index_add_(0, places, values)


def read(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Places and values of a top-k message of bytes."""
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
        self.places = drawn(len(values), num_kept(len(values), self.ratio), self._generator).to(values.device)
        return values[self.places]

    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        return self.all_reduce(message)

    def take_out(self, message: Tensor, values: Tensor) -> None:  # noqa: ARG002  the places are here as well
        values[self.places] = 0

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.zero_()
        bucket[self.places] = received if self.feedback else received * (len(bucket) / len(received))
        del self.places  # 8 bytes each, and the next step draws others


def drawn(numel: int, k: int, generator: torch.Generator) -> Tensor:
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
