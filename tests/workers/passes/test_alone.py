"""How far rounding alone may lead ranks from one process: what a twin is off by, and when nothing can be compared."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.passes.alone import MARGIN, allowed, difference, farthest, trained
from workers.report.progress import Work
from workers.workload.baseline import Losses

NAN = math.nan


def test_what_is_allowed_never_shrinks() -> None:
    """A twin that comes back by chance does not make the step exact."""
    assert allowed([4.0, 3.0, 2.0], [4.0, 3.5, 2.0], 0.0) == [0.0, 0.5 * MARGIN, 0.5 * MARGIN]
    assert allowed([4.0, -1.0], [4.0, -1.0], 0.25) == [1.0, 1.0]  # units of the largest loss so far


@pytest.mark.parametrize(
    ("losses", "twin", "steps"),
    [([1.0, NAN, 1.0], [1.0, 1.0, 1.0], 1), ([1.0, 1.0], [math.inf, 1.0], 0), ([], [], 0), ([1.0, 1.0], [1.0, 1.0], 2)],
)  # fmt: skip
def test_from_a_loss_that_is_no_number_on_nothing_is_allowed_or_held(
    losses: list[float], twin: list[float], steps: int
) -> None:
    assert len(allowed(losses, twin, 1e-7)) == steps


def test_the_farthest_step_is_so_by_its_share_of_what_is_allowed() -> None:
    assert farthest([1.0, 2.25, 3.5], [1.0, 2.0, 3.0], [0.0, 0.25, 1.0]) == (1, 0.25, 0.25)
    assert farthest([1.0, None, 3.0], [1.0, 2.0, 3.0], [0.1, 0.1, 0.1]) == (0, 0.0, 0.1)
    assert farthest([None, None], [1.0, 2.0], [0.1, 0.1]) is None
    assert farthest([NAN, 2.0], [1.0, 2.0], [9.0, 9.0])[0] == 0  # type: ignore[index]


def test_a_difference_has_a_norm_a_tensor_in_float64() -> None:
    one, other = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2, dtype=torch.bfloat16)}
    assert difference(one, other) == {"w": 5.0}


def test_the_one_process_counts_the_batches_that_went_through_it() -> None:
    work, told = Work(), []

    def train(model: torch.nn.Module, _batches: None, _config: None, steps: int) -> Losses:
        for _ in range(steps):
            model(torch.ones(1))
            told.append(work.told().partition(",")[0])
        return Losses([], {})

    lab: Any = SimpleNamespace(model=lambda _dtype: torch.nn.Linear(1, 1), work=work, config=SimpleNamespace(steps=2))
    trained(lab, torch.float32, None, train)  # type: ignore[arg-type]
    assert told == [f" ({done} of 2 steps while the others wait)" for done in (1, 2)]
