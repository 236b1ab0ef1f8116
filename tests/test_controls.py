"""Find checks without a control that makes them fail."""

from distlab.lab.rank.mode_loader import load
from tests.controls import control_exists, uncontrolled


def test_a_control_must_exist() -> None:
    mode = load("dp")
    assert control_exists("LAB_BUG=stale_bucket", mode)
    assert control_exists("tests/test_controls.py::test_a_control_must_exist", mode)
    for control in ("", "LAB_BUG=packed_qkv", "tests/test_controls.py::test_nothing", "tests/nowhere.py::test_nothing"):
        assert not control_exists(control, mode)


def test_checks_without_a_control_are_found() -> None:
    check = {"variant": "flat", "name": "weights", "control": ""}
    comparison = {"variant": "flat", "name": "bubble", "control": "", "decides": False, "shown": ""}
    run = {"checks": [check], "comparisons": [comparison, comparison | {"shown": "a time"}]}
    assert uncontrolled(run, load("dp")) == ["flat bubble: nothing", "flat weights: nothing"]
