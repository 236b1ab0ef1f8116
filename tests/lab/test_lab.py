"""What a Lab holds against a formula fails where it is off, and names what makes it fail."""

from typing import Any

import pytest

from distlab.contract import Claims, Counted, Instead, Mistake, Mode
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Order
from distlab.lab.measure.memory import CLASSES
from distlab.lab.measure.prediction import PYTORCHS, Prediction
from distlab.lab.measure.traffic import CalledOp, Traffic, WireBytes
from distlab.lab.report.records import Comparison
from distlab.lab.report.run_folder import Journal


def lab_alone(**mistakes: str) -> Lab:
    """A Lab that only writes down; the mode has a mistake for each check that is named."""
    lab: Any = Lab.__new__(Lab)
    lab.journal, lab.world_size, lab.rank = Journal(), 2, 0
    lab.config = Config.read({"LAB_MODEL": "line"})
    lab.mode = Mode(mistakes={name: Mistake("", check, Instead()) for name, check in mistakes.items()})
    lab.finished = lambda section: None
    return lab  # type: ignore[no-any-return]


def counted(called_bytes: float, wire_bytes: float, rest_bytes: int) -> dict[str, Any]:
    traffic = Traffic([CalledOp("all_reduce", "", 1, called_bytes, called_bytes)], {1: WireBytes(wire_bytes)})
    return {"flat": Counted(traffic, 0, dict.fromkeys(CLASSES, 0) | {"parameters": rest_bytes}, {}, Order({}))}


def held(lab: Lab) -> dict[str, bool]:
    entries = [entry for entry in lab.journal.records if isinstance(entry, Comparison)]
    return {entry.name: abs(entry.measured - entry.predicted) <= entry.tolerance for entry in entries}


def fails(lab: Lab, kind: str, predicted: float, seen: dict[str, Any]) -> set[str]:
    """What fails of one prediction."""
    lab.compare_predictions([Prediction("flat", kind, "", "S", (predicted, predicted), 1)], seen)
    return {name for name, holds in held(lab).items() if not holds}


@pytest.mark.parametrize(
    ("called", "wire", "wrong"),
    [
        (1e6, 1e6, set()),
        (1e6 + 1, 1e6, {"called bytes"}),
        (0.75e6, 1e6, {"called bytes"}),
        (1e6, 1.1e6, {"wire bytes"}),
        (1e6, 0.0, {"wire bytes"}),
    ],
)
def test_bytes_that_differ_from_their_formula_fail(called: float, wire: float, wrong: set[str]) -> None:
    assert fails(lab_alone(), "wire bytes", 1e6, counted(called, wire, 0)) == wrong


@pytest.mark.parametrize(("rest", "holds"), [(1000, True), (1011, False), (900, False)])
def test_leaked_bytes_fail(rest: int, holds: bool) -> None:
    assert fails(lab_alone(), "rest bytes", 1000.0, counted(0, 0, rest)) == (set() if holds else {"rest bytes"})


@pytest.mark.parametrize(("predicted", "holds"), [(1, True), (2, False)])
def test_calls_that_differ_from_their_formula_fail(predicted: int, holds: bool) -> None:
    assert fails(lab_alone(), "calls", predicted, counted(0, 0, 0)) == (set() if holds else {"calls"})


def test_the_control_of_a_check_is_first_an_injected_bug() -> None:
    lab = lab_alone(lost_shard="gradients")
    lab.check("gradients", 0, 0, control="tests/a.py::test_b")
    lab.check("weights", 0, 0, control="tests/a.py::test_b")
    assert [entry.control for entry in lab.journal.records] == ["LAB_BUG=lost_shard", "tests/a.py::test_b"]  # type: ignore[attr-defined]


def test_the_control_of_a_check_is_in_its_row() -> None:
    lab = lab_alone()
    rows = (Claims(("sum",), fails_in="test_a"), Claims(("bytes over ",), (), fails_in="tests/b.py::test_b"))
    lab.mode = Mode(claims=lambda _mode, _config: rows)
    for name in ("sum", "bytes over dp"):
        lab.check(name, 0, 0)
    found = [entry.control for entry in lab.journal.records]  # type: ignore[attr-defined]
    assert found == ["tests/experiments/test_dp.py::test_a", "tests/b.py::test_b"]
    with pytest.raises(LookupError, match="injected bug says what makes the check 'summ' fail"):
        lab.check("summ", 0, 0)


def test_an_informational_comparison_has_a_reason() -> None:
    lab = lab_alone(lost_shard="bubble")
    lab.compare("bubble", 0.5, 0.7, shown=PYTORCHS)
    (entry,) = lab.journal.records
    assert isinstance(entry, Comparison)
    assert (entry.decides, entry.shown, entry.control) == (False, PYTORCHS, "")
