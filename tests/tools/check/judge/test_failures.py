"""A rank has failed: the positions of the other ranks are reported, whichever is known first."""

from pathlib import Path
from typing import Any

import pytest

from distlab.tools.check.judge.coordinator import GATHER_S, LATE_S, Coordinator
from distlab.tools.check.judge.report import log_lines
from tests.tools.check.cases import SCRIPTS, check, coordinator_of, first_call, line_of, lines_of

HANG_AFTER_S = 5.0
ENGINE = ["/site-packages/torch/autograd/graph.py", 5, "_engine_run_backward"]
AT_WORK = ["/home/me/train.py", 9, "<module>"]
CALL = first_call("all_reduce", "train.py:4")
IDLE: list[list[Any]] = [["look", "S", 1.0, 0, 0.0, 1.0], ["look", "S", 1.0, 0, 0.0, 1.5]]
BUSY: list[list[Any]] = [["look", "R", 1.0, 0, 0.0, 1.0], ["look", "R", 1.5, 0, 0.0, 1.5]]
LIMIT = "Timed out waiting 3000ms for recv operation to complete"


def report(coordinator: Coordinator, rank: int, *lines: list[Any], at_s: float = 0.0) -> None:
    coordinator.receive(rank, lines_of(*lines), at_s)


def after_failure(*others: list[Any], text: str = "no", kind: str = "ValueError") -> Coordinator:
    """A coordinator that received at 0 s that rank 1 raised, and these reports of rank 0."""
    return coordinator_of(others, [["raised", kind, text, "", "train.py:3", 0.0]], hang_after_s=HANG_AFTER_S)


def over_at(coordinator: Coordinator, *times_s: float) -> list[bool]:
    found = []
    for time_s in times_s:
        coordinator.evaluate(time_s)
        found.append(coordinator.over)
    return found


def test_a_late_rank_is_reported_in_the_call_that_it_reached(tmp_path: Path) -> None:
    script = SCRIPTS / "late.py"
    checked = check(script, 2, tmp_path, "3", LAB_HANG_AFTER_S="30")
    (sentence,) = checked.sentences
    assert sentence.startswith("rank 1 raised ValueError: label 11 is out of range at ")
    assert f"{line_of(script, 'b')}; rank 0 waits for it in all_reduce #1 at {line_of(script, 'a')}" in sentence
    assert checked.seconds < 30, "it waited for the limit although no rank could continue"


def test_the_report_waits_for_an_outstanding_stack() -> None:
    """In a backward pass only its stack shows that a rank waits, and may arrive late on a busy machine."""
    coordinator = after_failure(*CALL, *IDLE)
    assert over_at(coordinator, GATHER_S, HANG_AFTER_S + 1) == [False, False]
    report(coordinator, 0, ["stacks", {"7": [ENGINE]}], at_s=HANG_AFTER_S + 1.5)
    assert over_at(coordinator, HANG_AFTER_S + 1.5) == [True]
    (finding,) = coordinator.findings
    assert finding.sentence.endswith("at train.py:3; rank 0 waits for it in all_reduce #0 at train.py:4")


def test_without_a_stack_the_last_call_is_reported() -> None:
    coordinator = after_failure(*CALL, *IDLE)
    assert over_at(coordinator, LATE_S - 0.1, LATE_S) == [False, True]
    (finding,) = coordinator.findings
    assert finding.sentence.endswith("rank 0 still idles, its last call was all_reduce #0 at train.py:4")
    assert list(finding.rows[0][:3]) == ["rank 0", "train.py:4", "all_reduce #0, its last call"]


@pytest.mark.parametrize(("looks", "says"), [(BUSY, "still computes"), (IDLE, "still idles")])
def test_a_rank_without_a_call_is_reported_with_its_line(looks: list[list[Any]], says: str) -> None:
    coordinator = after_failure(*CALL[:1], *looks, ["stacks", {"7": [AT_WORK]}])
    assert over_at(coordinator, GATHER_S, HANG_AFTER_S - 0.1, HANG_AFTER_S) == [False, False, True]
    (finding,) = coordinator.findings
    assert finding.sentence == f"rank 1 raised ValueError: no at train.py:3; rank 0 {says} at train.py:9"


def test_a_rank_that_keeps_calling_is_reported_with_its_last_call() -> None:
    """It is never silent for so long that its stack is requested."""
    coordinator = after_failure(*CALL, *BUSY)
    report(coordinator, 0, ["end", 1, 0.5], at_s=HANG_AFTER_S)
    assert over_at(coordinator, HANG_AFTER_S) == [True]
    assert "rank 0 still computes, its last call was all_reduce #0 at train.py:4" in coordinator.findings[0].sentence


@pytest.mark.parametrize("last", [["raised", "ValueError", "no", "", "train.py:3", 0.2], ["ended", 0, 0.2]])
def test_the_report_does_not_wait_if_all_have_ended(last: list[Any]) -> None:
    assert over_at(after_failure(last), GATHER_S - 0.1, GATHER_S) == [False, True]


def test_the_report_does_not_wait_for_a_rank_in_a_call() -> None:
    assert over_at(after_failure(*CALL, ["wait", 1, 7, 0.0]), GATHER_S) == [True]


def test_a_rank_that_raised_is_reported_so_though_its_threads_continue() -> None:
    coordinator = after_failure(*CALL, ["wait", 1, 7, 0.0])
    report(coordinator, 1, ["main", 8], ["stacks", {"8": [["/lib/python3.11/threading.py", 9, "_shutdown"]]}])
    coordinator.evaluate(GATHER_S)
    assert "raised ValueError" in " ".join(" ".join(log_lines(coordinator)).partition("where")[2].split())


def after_timeout() -> Coordinator:
    """Rank 0 works, while rank 1 waits for it in a call until the timeout passes."""
    coordinator = coordinator_of([*CALL[:1], *BUSY, ["stacks", {"7": [AT_WORK]}]], CALL, hang_after_s=HANG_AFTER_S)
    report(coordinator, 1, ["raised", "RuntimeError", LIMIT, "", "train.py:4", 0.0])
    coordinator.evaluate(0.0)
    return coordinator


@pytest.mark.parametrize("arrives", [False, True])
def test_a_busy_rank_is_the_cause_of_a_timeout_even_if_it_arrives_later(arrives: bool) -> None:
    coordinator = after_timeout()
    if arrives:
        refused: list[Any] = ["raised", "RuntimeError", "Connection closed by peer", "", "train.py:4", 1.0]
        report(coordinator, 0, *CALL[1:], refused, at_s=1.0)
    assert over_at(coordinator, GATHER_S) == [True]
    (finding,) = coordinator.findings
    assert finding.ranks == (0,)
    assert "the timeout of 3 s" in finding.sentence
    assert "rank 0 was still at train.py:9" in finding.sentence
