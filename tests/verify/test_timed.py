"""Seconds are held to identities: whatever is left out, begun elsewhere, added up or averaged wrong, is told."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distlab.collectives.phases import Span
from distlab.measure.timeline import Lap
from distlab.report.records import Steps
from distlab.verify.timed import Timed, check_seconds

LENGTHS_S = (9.0, 5.0, 1.0, 3.0, 2.0)  # of five steps, which begin 10 s after each other


def lap(began_s: float, wall_s: float, cpu_s: float) -> Lap:
    return cast(Lap, SimpleNamespace(began_s=began_s, ended_s=began_s + wall_s, wall_s=wall_s, cpu_s=cpu_s))


def marks(step: int) -> list[Span]:
    """Of a step: data before it, and half of it forward, with a message in its midst, and half backward."""
    began, length = 10.0 * step, LENGTHS_S[step]
    return [
        Span("data", "", began - 0.5, began - 0.25),
        Span("forward", "0", began, began + length / 2),
        Span("all_reduce", "", began + 0.125, began + 0.25),
        Span("backward", "0", began + length / 2, began + length),
    ]


def right() -> Timed:
    kept = LENGTHS_S[2:]
    laps = [lap(10.0 * step, length, length / 4) for step, length in enumerate(LENGTHS_S)]
    around = [lap(10.0 * step - 1, length + 1, length / 2) for step, length in enumerate(LENGTHS_S)]
    median = {"data": 0.25, "forward": 0.875, "backward": 1.0, "communication": 0.125, "optimizer": 0.0, "waiting": 0.0}
    return Timed(
        laps,
        around,
        [(step, marks(step)) for step in range(2, 5)],
        Steps("flat", list(kept), [each / 4 for each in kept]),
        median,
    )


def checked(timed: Timed) -> tuple[float, str]:
    found: list[Any] = []
    lab: Any = SimpleNamespace(check=lambda *claim, **words: found.append((*claim, words)))
    check_seconds(lab, {"flat": timed})
    ((name, faults, tolerance, words),) = found
    assert (name, tolerance) == ("timed seconds", 0)
    return faults, words["detail"]


def test_seconds_that_are_right_hold() -> None:
    assert checked(right()) == (0, "3 steps")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": Steps("flat", [*LENGTHS_S], [*LENGTHS_S])}, "5 and 5 seconds of 5 steps, of which 2 are left out"),
        ({"steps": Steps("flat", [*LENGTHS_S[:3]], [each / 4 for each in LENGTHS_S[:3]])}, "a step of 9 s"),
        ({"steps": Steps("flat", [*LENGTHS_S[2:]], [100.0, 101.0, 102.0])}, "100 CPU s"),
        ({"steps": Steps("flat", [math.nan] * 3, [each / 4 for each in LENGTHS_S[2:]])}, "a step of nan s"),
        ({"marked": [(2, [*marks(2)[1:], Span("data", "", 20.0, 20.5)])]}, "data is fetched while the step is timed"),
        ({"marked": [(2, marks(2)[1:])]}, "or unmarked"),
        ({"laps": right().around}, "data is fetched while the step is timed"),  # the watch began before
        ({"laps": [lap(10.0 * step, 0.5, 0.1) for step in range(5)]}, "marks that are not in their step of 0.5 s"),
        ({"profile": {**right().profile, "backward": 1.5}}, "1.5 s of backward are no median of 3 steps"),
    ],
)
def test_seconds_that_are_wrong_fail(changes: dict[str, Any], told: str) -> None:
    faults, detail = checked(right()._replace(**changes))
    assert faults > 0
    assert told in detail


def test_marks_that_count_twice_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner one is not taken from the outer one."""
    monkeypatch.setattr(
        "distlab.verify.timed.profile",
        lambda spans: {"forward": sum(span.end_s - span.start_s for span in spans)},
    )
    assert "classes that add up to 0.125 s more" in checked(right()._replace(profile={}))[1]


def test_of_two_steps_none_is_left_out() -> None:
    few = right()._replace(around=right().around[:2], marked=[], steps=Steps("flat", [9.0, 5.0], [1.0, 1.0]))
    assert checked(few) == (0, "2 steps")
