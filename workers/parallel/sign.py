"""One bit a number: its sign, and for the whole bucket the mean magnitude (EF-SignSGD; Karimireddy et al. 2019,
algorithm 1).

    C(v) = mean|v| · sign(v)

Signs alone lose the size of a gradient, and where a majority of ranks decides (signSGD; Bernstein et al. 2018) the size
of its parts too: neither need converge. With the scale and error feedback C is a contraction, and converges as SGD
does. So ranks do not vote: each sends its own scale, and scaled signs are added. Bits of several ranks cannot be added
in place, so they are gathered: (N-1)·(n/8 + scale) bytes, less than dense sums while N < 64.
"""

from typing import Any

import torch
from torch import Tensor

from workers.parallel.compression import OneMessage

PIECE = 1 << 16  # numbers that fit into a core's cache with their magnitudes


class Sign(OneMessage):
    """Eight signs a byte, the first number's in the lowest bit; zero counts as positive. The message ends with the
    scale."""

    def encode(self, values: Tensor) -> Tensor:
        return torch.cat([packed(values >= 0), mean_magnitude(values).view(1).view(torch.uint8)])

    def exchange(self, message: Tensor) -> tuple[Any, Tensor]:
        return self.all_gather(message)

    def take_out(self, message: Tensor, values: Tensor) -> None:
        _, scale = read(message, values.dtype)
        values.sub_(torch.copysign(scale, values + 0.0))  # its own signs, a negative zero's made positive

    def decode(self, received: Tensor, bucket: Tensor) -> None:
        bucket.zero_()
        for message in received:
            bits, scale = read(message, bucket.dtype)
            bucket.add_(signs(bits, len(bucket), scale))


def read(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The packed signs and the scale [1] of a message of bytes."""
    wide = torch.promote_types(dtype, torch.float32)
    return message[: -wide.itemsize], message[-wide.itemsize :].clone().view(wide).to(dtype)


def mean_magnitude(values: Tensor) -> Tensor:
    """In float32 or wider, piece by piece: a norm over 10M float32 in one go adds them in a row, and came out 0.6 %
    short."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.stack([piece.abs().sum(dtype=wide) for piece in values.split(PIECE)]).sum() / len(values)


def packed(positive: Tensor) -> Tensor:
    """[n] bools as [ceil(n/8)] bytes."""
    bits = torch.nn.functional.pad(positive.view(torch.uint8), (0, -len(positive) % 8)).view(-1, 8)
    out = bits[:, 0].clone()
    for place in range(1, 8):
        out |= bits[:, place] << place
    return out


def signs(packed_bits: Tensor, numel: int, scale: Tensor) -> Tensor:
    """The first `numel` signs, times `scale`: each byte looks its eight up in a table."""
    bits = torch.arange(256, device=packed_bits.device)[:, None] >> torch.arange(8, device=packed_bits.device) & 1
    table = (2 * bits - 1) * scale  # [256, 8]
    return table.index_select(0, packed_bits.int()).flatten()[:numel]
