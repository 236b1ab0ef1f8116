"""Eight ranks that are three: the formula, and what real ranks are asked for."""

from typing import Any

import pytest
import torch

from distlab.tools.lessons.eight_ranks import HEAD, NUM_RANKS, SHARE, WAYS, Way, rows, speedup, step_seconds
from distlab.tools.testing.warm_ranks import Ranks


def test_eight_ranks_that_wait_most_of_the_time_are_three() -> None:
    assert speedup(SHARE, 1.0) == pytest.approx(3.0)
    assert speedup(4 * SHARE, 1.0) == pytest.approx(8 * 2.4 / 3.4)
    assert speedup(SHARE, 0.5) == pytest.approx(8 * 0.6 / 1.1)
    assert speedup(SHARE, 1.0, overlaps=True) == pytest.approx(4.8)
    assert speedup(1.0, 0.0) == NUM_RANKS


def test_a_row_has_what_was_measured_beside_what_was_predicted() -> None:
    def on_ranks(num_ranks: int, function: Any, *args: Any) -> list[float]:
        assert num_ranks == NUM_RANKS
        if function is step_seconds:
            way, compute_s = args
            sum_s = 1.0 if way.dtype == torch.float32 else 0.5
            return [max(compute_s, sum_s) if way.overlaps else compute_s + sum_s] * num_ranks
        return [1.0 if args[0] == torch.float32 else 0.5] * num_ranks

    found = rows(on_ranks)
    assert [row[0] for row in found] == [way.name for way in WAYS]
    assert all(len(row) == len(HEAD) and row[3] == row[4] for row in found)
    assert found[0] == ["as it is", "600", "1000", "3.0", "3.0", "37%"]


@pytest.mark.parametrize("way", [Way("", dtype=torch.bfloat16), Way("", overlaps=True)])
def test_a_step_ends_on_every_rank(ranks: Ranks, way: Way) -> None:
    assert all(seconds > 0.01 for seconds in ranks(3, step_seconds, way, 0.01))
