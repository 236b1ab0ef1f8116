"""Puzzle 12: the errors in a pipeline's actions are named."""

import pytest

from distlab.tools.puzzle.tasks.pipeline import schedule_fault


@pytest.mark.parametrize(
    ("schedules", "fault"),
    [
        ([[("F", 0), ("B", 0)]], ""),
        ([[("F", 0), ("F", 1), ("B", 0), ("B", 1)], [("F", 0), ("B", 0), ("F", 1), ("B", 1)]], ""),
        ([[("F", 0)]], "stage 0 has to do F and B of each microbatch once, but has 1 actions"),
        ([[("B", 0), ("F", 0)]], "no stage can continue: stage 0 waits for F 0 of stage 0"),
        ([[("F", 0), ("F", 1), ("B", 0), ("B", 1)]], "stage 0 keeps the activations of 2 microbatches at one time, allowed 1"),
        (
            [[("F", 0), ("B", 0), ("F", 1), ("B", 1)]] * 2,
            "the bubble is 50.0% of the time, allowed 33.3%",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_schedule_is_said(schedules: list[list[tuple[str, int]]], fault: str) -> None:
    assert schedule_fault(schedules, max(number for _, number in schedules[0]) + 1) == fault
