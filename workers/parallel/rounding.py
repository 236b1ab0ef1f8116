"""From float32 to 16 bits: to the nearest number, or to one of the two neighbours at random.

To the nearest, an update that is less than half a unit in the last place of its weight is lost, and lost again at every
step. Stochastic rounding goes up with a probability that is the share of the way: the expected value is exact, so that
small updates arrive, one in so many (Gupta et al. 2015, section 3.1). bf16 is the upper half of a float32: a random
number is added to the lower half, whose carry is the step up, and the lower half is cut off.
"""

import math

import torch
from torch import Tensor


def stochastic_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values` (float32) as bfloat16, up or down at random; what is not finite stays as it is."""
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, generator=generator, device=values.device)
    bits = (values.view(torch.int32) + noise).bitwise_and_(-(1 << 16))
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of `dtype` at each of `values`, a unit in the last place, in float64."""
    limits = torch.finfo(dtype)
    _, exponents = torch.frexp(values.double().abs().clamp(min=limits.smallest_normal))  # |value| in [2^(e-1), 2^e)
    ones = torch.ones(values.shape, dtype=torch.float64, device=values.device)
    return torch.ldexp(ones, exponents - 1 + round(math.log2(limits.eps)))
