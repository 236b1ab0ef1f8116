"""One bit of one number of a tensor flips, as in a memory or a processor that is going bad (Dixit et al. 2021, "Silent
Data Corruptions at Scale").

    sign       the highest bit
    exponent   the 8 after it (11 in float64, 5 in float16): the number is 2^1 to 2^128 times as large, or as small
    highest    of the exponent: what is below 2 becomes 2^128 times as large
    mantissa   the 3 highest of the rest: by a 2nd, a 4th or an 8th of its power of two
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EXPONENT_BITS = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8, torch.float64: 11}
HIGH = 3  # bits of the mantissa
HIGHEST = "highest"
PACKED_BIT = 6


@dataclass(frozen=True)
class Flip:
    """What was done: bit `bit`, counted from the lowest, of element `index` of the flattened tensor."""

    index: int
    bit: int
    before: float
    after: float

    def __str__(self) -> str:
        return f"[{self.index}] bit {self.bit}: {self.before:g} became {self.after:g}"


def bits_of(dtype: torch.dtype, kind: str) -> range:
    """The bits that count as sign, exponent, its highest, or (the three highest of the) mantissa."""
    sign = 8 * dtype.itemsize - 1
    exponent = sign - EXPONENT_BITS[dtype]
    return {
        "sign": range(sign, sign + 1),
        "exponent": range(exponent, sign),
        HIGHEST: range(sign - 1, sign),
        "mantissa": range(exponent - HIGH, exponent),
    }[kind]


@torch.no_grad()
def flip(tensor: Tensor, kind: str, draw: random.Random) -> Flip:
    """Flip one bit in place; of the numbers that are not small beside the others, so that it can matter.

    Of packed bytes it is the second bit of the last one: of a float that stands there the highest of its exponent.
    """
    flat = tensor.detach().reshape(-1)
    assert flat.data_ptr() == tensor.data_ptr(), "a view of the tensor, or its copy would be changed"
    if flat.dtype == torch.uint8:
        before = flat[-1].item()
        flat[-1] ^= 1 << PACKED_BIT
        return Flip(len(flat) - 1, PACKED_BIT, before, flat[-1].item())
    large = (flat.abs() >= flat.abs().mean()).nonzero()
    index = int(large[draw.randrange(len(large))]) if len(large) else draw.randrange(len(flat))
    bit = draw.choice(bits_of(tensor.dtype, kind))
    before = flat[index].item()
    word = flat[index : index + 1].view(WORDS[tensor.dtype.itemsize])
    width = 8 * tensor.dtype.itemsize
    mask = 1 << bit if bit < width - 1 else -(1 << bit)  # the sign's word is the negative one
    word.bitwise_xor_(mask)
    return Flip(index, bit, before, flat[index].item())
