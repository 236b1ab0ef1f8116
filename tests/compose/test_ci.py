"""The workflow for users' own repositories, in containers: its steps in a new folder with a checkout of the lab."""

from pathlib import Path

import pytest

from tests.docs.test_ci import WORKFLOW, commands, fresh_repository, run_step
from tests.test_distlab import SCRIPT

pytestmark = [pytest.mark.compose, pytest.mark.timeout(400)]


def test_the_steps_with_containers_pass(clone: Path, tmp_path: Path) -> None:
    folder = fresh_repository(tmp_path / "user", SCRIPT)
    (folder / ".distlab").symlink_to(clone)
    smoke, check = commands("containers").values()
    settings = {"WORLD_SIZE": "2", "LAB_RUNS_DIR": str(folder / "runs"), "COMPOSE_PROJECT_NAME": clone.name}
    assert "LAB_RUNS_DIR" in WORKFLOW["env"]
    done = run_step(smoke, folder, **settings)
    assert done.returncode == 0, done.stdout
    assert "PASS" in done.stdout
    done = run_step(check, folder, **settings)
    assert done.returncode == 0, done.stdout
    assert (folder / "runs" / "latest" / "report.html").is_file()
