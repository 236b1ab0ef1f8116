"""The workflow for users' own repositories, in containers: its steps in a fresh folder, beside a checkout of the lab."""

from pathlib import Path

import pytest

from tests.docs.test_ci import WORKFLOW, commands, ended, fresh_repository
from tests.test_distlab import SCRIPT

pytestmark = [pytest.mark.compose, pytest.mark.timeout(400)]


def test_the_steps_with_containers_pass(clone: Path, tmp_path: Path) -> None:
    folder = fresh_repository(tmp_path / "theirs", SCRIPT)
    (folder / ".distlab").symlink_to(clone)
    smoke, check = commands("containers").values()
    given = {"WORLD_SIZE": "2", "LAB_RUNS_DIR": str(folder / "runs"), "COMPOSE_PROJECT_NAME": clone.name}
    assert "LAB_RUNS_DIR" in WORKFLOW["env"]
    done = ended(smoke, folder, **given)
    assert done.returncode == 0, done.stdout
    assert "PASS" in done.stdout
    done = ended(check, folder, **given)
    assert done.returncode == 0, done.stdout
    assert (folder / "runs" / "latest" / "report.html").is_file()
