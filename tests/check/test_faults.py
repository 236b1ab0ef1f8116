"""Every planted fault is named: the ranks, the number of the call in its group, and both lines."""

import re
from pathlib import Path

import pytest

from tests.check.cases import SCRIPTS, check, line_of
from tests.check.planted import PLANTED, Planted, missed


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_it_is_named(planted: Planted, tmp_path: Path) -> None:
    script = SCRIPTS / "faults" / f"{planted.name}.py"
    checked = check(script, planted.world_size, tmp_path, LAB_HANG_AFTER_S="2")
    assert checked.code == planted.exit_code, checked.said
    assert not missed(planted, checked), checked.said


def test_all_scripts_are_in_the_table() -> None:
    assert {path.stem for path in (SCRIPTS / "faults").glob("*.py")} == {planted.name for planted in PLANTED}
    for planted in PLANTED:
        for marker in planted.lines:
            assert re.fullmatch(rf"{planted.name}\.py:\d+", line_of(SCRIPTS / "faults" / f"{planted.name}.py", marker))
