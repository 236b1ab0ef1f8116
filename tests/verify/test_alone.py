"""How far rounding alone may lead ranks from one process: what a twin is off by, and when nothing can be compared."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.report.progress import Work
from distlab.verify.reference_run import MARGIN, allowed, trained
from distlab.workload.reference import Losses

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
