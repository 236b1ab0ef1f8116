"""No false alarm: scripts that are right end with 0, without a finding and without a question."""

from pathlib import Path

import pytest

from tests.check.cases import SCRIPTS, check
from tests.check.right import RIGHT, Right


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.name)
def test_nothing_is_said_of_it(right: Right, tmp_path: Path) -> None:
    checked = check(SCRIPTS / "right" / f"{right.name}.py", right.world_size, tmp_path)
    assert checked.code == 0, checked.said
    assert not checked.sentences
    assert "question" not in checked.said
    assert "is not recorded" not in checked.said


def test_all_scripts_are_in_the_table() -> None:
    under_an_agent = {"elastic"}  # test_torchrun.py
    assert {path.stem for path in (SCRIPTS / "right").glob("*.py")} == {right.name for right in RIGHT} | under_an_agent
