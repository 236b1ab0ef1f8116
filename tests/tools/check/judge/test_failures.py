"""A rank has failed: where each of the others stands is told alike, whoever comes to it first."""

from pathlib import Path
from typing import Any

import pytest

from distlab.tools.check.judge.coordinator import GATHER_S, LATE_S, Coordinator
from distlab.tools.check.judge.report import log_lines
from tests.tools.check.cases import SCRIPTS, called, check, doctor_of, line_of, lines_of

HANG_AFTER_S = 5.0
ENGINE = ["/site-packages/torch/autograd/graph.py", 5, "_engine_run_backward"]
AT_WORK = ["/home/me/train.py", 9, "<module>"]
CALL = called("all_reduce", "train.py:4")
IDLE: list[list[Any]] = [["look", "S", 1.0, 0, 0.0, 1.0], ["look", "S", 1.0, 0, 0.0, 1.5]]
BUSY: list[list[Any]] = [["look", "R", 1.0, 0, 0.0, 1.0], ["look", "R", 1.5, 0, 0.0, 1.5]]
LIMIT = "Timed out waiting 3000ms for recv operation to complete"


def tell(doctor: Coordinator, rank: int, *lines: list[Any], at_s: float = 0.0) -> None:
    doctor.receive(rank, lines_of(*lines), at_s)


def failed(*others: list[Any], text: str = "no", kind: str = "ValueError") -> Coordinator:
    """A doctor that has heard at 0 s how rank 1 raised, and this of rank 0."""
    return doctor_of(others, [["raised", kind, text, "", "train.py:3", 0.0]], hang_after_s=HANG_AFTER_S)


def over_at(doctor: Coordinator, *times_s: float) -> list[bool]:
    found = []
    for time_s in times_s:
        doctor.evaluate(time_s)
        found.append(doctor.over)
    return found


def test_who_comes_to_its_call_late_is_told_in_it(tmp_path: Path) -> None:
    script = SCRIPTS / "late.py"
    checked = check(script, 2, tmp_path, "3", LAB_HANG_AFTER_S="30")
    (sentence,) = checked.sentences
    assert sentence.startswith("rank 1 raised ValueError: label 11 is out of range at ")
    assert f"{line_of(script, 'b')}; rank 0 waits for it in all_reduce #1 at {line_of(script, 'a')}" in sentence
    assert checked.seconds < 30, "the bound was waited for though both ranks stood still"


def test_who_has_not_answered_where_it_is_is_waited_for() -> None:
    """In a backward pass nothing tells that it waits but its stack, which may come late on a busy machine."""
    doctor = failed(*CALL, *IDLE)
    assert over_at(doctor, GATHER_S, HANG_AFTER_S + 1) == [False, False]
    tell(doctor, 0, ["stacks", {"7": [ENGINE]}], at_s=HANG_AFTER_S + 1.5)
    assert over_at(doctor, HANG_AFTER_S + 1.5) == [True]
    (finding,) = doctor.findings
    assert finding.sentence.endswith("at train.py:3; rank 0 waits for it in all_reduce #0 at train.py:4")


def test_who_never_answers_is_told_by_its_last_call() -> None:
    doctor = failed(*CALL, *IDLE)
    assert over_at(doctor, LATE_S - 0.1, LATE_S) == [False, True]
    (finding,) = doctor.findings
    assert finding.sentence.endswith("rank 0 still idles, its last call was all_reduce #0 at train.py:4")
    assert list(finding.rows[0][:3]) == ["rank 0", "train.py:4", "all_reduce #0, its last call"]


@pytest.mark.parametrize(("looks", "says"), [(BUSY, "still computes"), (IDLE, "still idles")])
def test_who_makes_no_call_until_the_bound_is_told_where_it_is(looks: list[list[Any]], says: str) -> None:
    doctor = failed(*CALL[:1], *looks, ["stacks", {"7": [AT_WORK]}])
    assert over_at(doctor, GATHER_S, HANG_AFTER_S - 0.1, HANG_AFTER_S) == [False, False, True]
    (finding,) = doctor.findings
    assert finding.sentence == f"rank 1 raised ValueError: no at train.py:3; rank 0 {says} at train.py:9"


def test_who_calls_on_until_the_bound_is_told_by_its_last_call() -> None:
    """It is never silent for long enough to be asked where it is."""
    doctor = failed(*CALL, *BUSY)
    tell(doctor, 0, ["end", 1, 0.5], at_s=HANG_AFTER_S)
    assert over_at(doctor, HANG_AFTER_S) == [True]
    assert "rank 0 still computes, its last call was all_reduce #0 at train.py:4" in doctor.findings[0].sentence


@pytest.mark.parametrize("last", [["raised", "ValueError", "no", "", "train.py:3", 0.2], ["ended", 0, 0.2]])
def test_nobody_is_waited_for_where_all_have_ended(last: list[Any]) -> None:
    assert over_at(failed(last), GATHER_S - 0.1, GATHER_S) == [False, True]


def test_who_waits_in_its_call_already_is_not_waited_for() -> None:
    assert over_at(failed(*CALL, ["wait", 1, 7, 0.0]), GATHER_S) == [True]


def test_who_has_raised_and_whose_threads_go_on_is_told_as_raised() -> None:
    doctor = failed(*CALL, ["wait", 1, 7, 0.0])
    tell(doctor, 1, ["main", 8], ["stacks", {"8": [["/lib/python3.11/threading.py", 9, "_shutdown"]]}])
    doctor.evaluate(GATHER_S)
    assert "raised ValueError" in " ".join(" ".join(log_lines(doctor)).partition("where")[2].split())


def at_limit() -> Coordinator:
    """Rank 0 works, while rank 1 waits for it in a call until the limit passes."""
    doctor = doctor_of([*CALL[:1], *BUSY, ["stacks", {"7": [AT_WORK]}]], CALL, hang_after_s=HANG_AFTER_S)
    tell(doctor, 1, ["raised", "RuntimeError", LIMIT, "", "train.py:4", 0.0])
    doctor.evaluate(0.0)
    return doctor


@pytest.mark.parametrize("comes", [False, True])
def test_who_was_at_work_as_a_limit_passed_is_the_cause_whether_or_not_it_comes_then(comes: bool) -> None:
    doctor = at_limit()
    if comes:
        refused: list[Any] = ["raised", "RuntimeError", "Connection closed by peer", "", "train.py:4", 1.0]
        tell(doctor, 0, *CALL[1:], refused, at_s=1.0)
    assert over_at(doctor, GATHER_S) == [True]
    (finding,) = doctor.findings
    assert finding.ranks == (0,)
    assert "the timeout of 3 s" in finding.sentence
    assert "rank 0 was still at train.py:9" in finding.sentence
