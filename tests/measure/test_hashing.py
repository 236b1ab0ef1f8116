"""The hash of a tensor's bytes: one bit more or less always shows, wherever it is."""

import random

import pytest
import torch

from distlab.measure.tensors import hash_of

pytestmark = pytest.mark.timeout(60)
WORDS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def flipped(tensor: torch.Tensor, index: int, bit: int) -> torch.Tensor:
    copy = tensor.clone()
    word = copy.view(WORDS[tensor.dtype])
    word[index] ^= 1 << bit if bit < 8 * tensor.dtype.itemsize - 1 else -(1 << bit)
    return copy


@pytest.mark.parametrize("dtype", WORDS)
def test_every_bit_shows(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, generator=torch.Generator().manual_seed(1)).to(dtype)  # 1 to 4 bytes beyond whole words
    known = {hash_of(tensor)}
    for index in range(len(tensor)):
        for bit in range(8 * dtype.itemsize):
            known.add(hash_of(flipped(tensor, index, bit)))
    assert len(known) == 1 + 5 * 8 * dtype.itemsize


def test_two_flips_of_the_highest_bit_show() -> None:
    tensor = torch.ones(4, dtype=torch.float64)
    assert hash_of(flipped(flipped(tensor, 1, 63), 2, 63)) != hash_of(tensor)
    assert hash_of(-tensor) != hash_of(tensor)


def test_it_shows_anywhere_in_a_large_tensor() -> None:
    tensor = torch.zeros(1 << 16)
    places = random.Random(5).sample(range(1 << 16), 50)
    hashes = {hash_of(flipped(tensor, index, 31)) for index in places}
    assert len(hashes) == 50
    assert hash_of(tensor) not in hashes


def test_equal_bytes_have_equal_hashes_wherever_they_lie() -> None:
    flat = torch.randn(101, generator=torch.Generator().manual_seed(2))
    view = flat[1:100]  # begins in the middle of a word
    assert hash_of(view) == hash_of(view.clone())
    assert hash_of(torch.ones(3, 5).t()) == hash_of(torch.ones(5, 3))


def test_what_is_equal_as_a_number_is_not_always_equal_in_bits() -> None:
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))


def test_a_swap_and_another_length_show() -> None:
    draw = random.Random(3)
    tensor = torch.tensor([draw.random() for _ in range(64)], dtype=torch.float64)
    swapped = tensor.clone()
    swapped[[3, 40]] = swapped[[40, 3]]
    assert hash_of(swapped) != hash_of(tensor)
    assert hash_of(torch.zeros(8)) != hash_of(torch.zeros(9)) != hash_of(torch.zeros(10))
    assert hash_of(torch.zeros(0)) == hash_of(torch.zeros(0, dtype=torch.float64))
