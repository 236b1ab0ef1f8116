"""Places and bytes of experts, on numbers that one can count."""

import pytest

from distlab.expert_parallel.costs import even_row_bytes, expert_places, row_bytes

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "places"),
    [(1024, 2, 8, 1.25, 320), (1024, 1, 8, 1.0, 128), (37, 1, 5, 1.0, 8), (3, 1, 8, 0.5, 1), (11, 2, 4, 0, 11)],
)
def test_places(tokens: int, top_k: int, experts: int, factor: float, places: int) -> None:
    assert expert_places(tokens, top_k, experts, factor) == places


def test_a_row_goes_there_and_back_twice() -> None:
    """One that leaves: itself, and backward the gradient of what came back; one that comes: the other two."""
    assert row_bytes(1, 0, 5) == row_bytes(0, 1, 5) == 2 * 5 * 4
    assert row_bytes(3, 4, 5, itemsize=8) == 14 * 5 * 8


def test_even_rows_are_rows_that_all_ranks_give_alike() -> None:
    """64 tokens on 4 ranks choose 2 of 8 experts: 8 rows from each rank to each."""
    assert even_row_bytes(4, 64, 2, 5) == row_bytes(3 * 8, 3 * 8, 5)
    assert even_row_bytes(1, 64, 2, 5) == 0
