"""A flip changes one bit of one number, of the kind that was asked for, in place."""

import random

import pytest
import torch

from distlab.faults.injectors import WORDS, bits_of, flip

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["sign", "exponent", "mantissa"])
def test_one_bit_of_that_kind_changes(dtype: torch.dtype, kind: str) -> None:
    for seed in range(20):
        tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        before = tensor.clone().view(-1).view(WORDS[dtype.itemsize])
        done = flip(tensor, kind, random.Random(seed))
        changed = before ^ tensor.view(-1).view(WORDS[dtype.itemsize])
        assert changed.nonzero().flatten().tolist() == [done.index]
        bits = int(changed[done.index]) & (1 << 8 * dtype.itemsize) - 1
        assert bits == 1 << done.bit
        assert done.bit in bits_of(dtype, kind)


def test_a_sign_turns_and_an_exponent_multiplies() -> None:
    tensor = torch.tensor([1.5])
    assert flip(tensor, "sign", random.Random(1)).after == -1.5
    done = flip(tensor, "exponent", random.Random(1))
    assert abs(done.after / done.before) in {2.0**power for power in (*range(-128, 0), *range(1, 129))}


def test_bits_lie_where_the_formats_have_them() -> None:
    assert list(bits_of(torch.float32, "sign")) == [31]
    assert bits_of(torch.float32, "exponent") == range(23, 31)
    assert bits_of(torch.float32, "mantissa") == range(20, 23)
    assert bits_of(torch.float64, "exponent") == range(52, 63)
    assert bits_of(torch.bfloat16, "exponent") == range(7, 15)
    assert bits_of(torch.float32, "highest") == range(30, 31)


def test_the_highest_bit_of_a_packed_float_is_that_of_the_float() -> None:
    packed = torch.tensor([1.0]).view(torch.uint8)
    flip(packed, "sign", random.Random(1))
    assert packed.view(torch.float32).item() == float("inf")


def test_a_number_that_matters_is_taken_and_zeros_too_where_there_is_nothing_else() -> None:
    tensor = torch.zeros(100)
    tensor[42] = 1.0
    assert flip(tensor, "mantissa", random.Random(3)).index == 42
    assert flip(torch.zeros(4), "sign", random.Random(3)).bit == 31


def test_what_is_no_view_is_refused() -> None:
    with pytest.raises(AssertionError, match="its copy would be changed"):
        flip(torch.ones(3, 5).t(), "sign", random.Random(1))
