"""A claim that nothing makes fail is found."""

from distlab.lab.rank.mode_loader import load
from tests.controls import there, uncontrolled


def test_what_is_named_has_to_be_there() -> None:
    mode = load("dp")
    assert there("LAB_BUG=stale_bucket", mode)
    assert there("tests/test_controls.py::test_what_is_named_has_to_be_there", mode)
    for control in ("", "LAB_BUG=packed_qkv", "tests/test_controls.py::test_nothing", "tests/nowhere.py::test_nothing"):
        assert not there(control, mode)


def test_a_claim_without_a_control_is_named_and_so_is_a_number_shown_for_no_reason() -> None:
    check = {"variant": "flat", "name": "weights", "control": ""}
    comparison = {"variant": "flat", "name": "bubble", "control": "", "decides": False, "shown": ""}
    run = {"checks": [check], "comparisons": [comparison, comparison | {"shown": "a time"}]}
    assert uncontrolled(run, load("dp")) == ["flat bubble: nothing", "flat weights: nothing"]
