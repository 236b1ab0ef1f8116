"""The workflow for users' own repositories: docs/running.md names its steps, and they work in a new folder.

Steps that need a network (actions, installation) are left out; instead of an installed lab there is a command on the
PATH.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.docs.pages import TOP, page
from tests.documents import tables
from tests.test_distlab import MODEL, SCRIPT

FILE = TOP / "engines" / "github" / "distlab.yml"
WORKFLOW: dict[str, Any] = yaml.safe_load(FILE.read_text())
HANGS = SCRIPT.replace("dist.all_reduce(x)", "dist.get_rank() or dist.all_reduce(x)")


def commands(job: str) -> dict[str, str]:
    """Return the shell lines of a job's steps by name."""
    return {step["name"]: step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step}


def run_step(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step in this folder with the shell that GitHub uses."""
    known = re.compile(r"LAB_|COMPOSE_|RUN_MODE$|WORLD_SIZE$|RANK$|MASTER_")
    environ = {name: value for name, value in os.environ.items() if not known.match(name)} | variables
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], cwd=folder, env=environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
    )  # fmt: skip


def fresh_repository(folder: Path, script: str) -> Path:
    """Make a user's repository with a script and a model."""
    folder.mkdir()
    (folder / "train.py").write_text(script.replace("import only_installed\n", ""))
    (folder / "model.py").write_text(MODEL)
    return folder


def test_the_page_names_the_steps_that_can_fail() -> None:
    rows = [row for heading, row in tables(page("running")) if heading == "In your CI"]
    steps = [(job, name) for job in WORKFLOW["jobs"] for name in commands(job) if name.endswith("?")]
    assert [(row[0].strip("`"), row[1]) for row in rows] == steps


def test_every_job_has_a_limit_a_cache_and_artifacts() -> None:
    for workflow in (FILE, TOP / ".github" / "workflows" / "ci.yml"):
        jobs = yaml.safe_load(workflow.read_text())["jobs"]
        assert all(0 < job["timeout-minutes"] < 360 for job in jobs.values())
        for job in jobs.values():
            steps = [step for step in job["steps"] if step.get("if") == "failure()"]
            assert any("upload-artifact" in step["uses"] and "runs/" in step["with"]["path"] for step in steps)
            assert all("cache" in step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))


@pytest.mark.parametrize(("script", "code"), [(SCRIPT, 0), (HANGS, 1)], ids=["right", "hangs"])
def test_the_steps_with_local_processes_return_their_codes(tmp_path: Path, script: str, code: int) -> None:
    folder = fresh_repository(tmp_path / "user", script)
    command = tmp_path / "bin" / "distlab"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m distlab "$@"\n')
    command.chmod(0o755)
    settings = {
        "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(TOP), "WORLD_SIZE": "2",
        "LAB_RUNS_DIR": str(folder / "runs"), "LAB_HANG_AFTER_S": "1",
    }  # fmt: skip
    install, check, prove, junit = commands("processes").values()
    assert "pip install" in install
    done = run_step(check, folder, **settings)
    assert done.returncode == code, done.stdout
    done = run_step(prove, folder, **settings)
    assert done.returncode == 0, done.stdout
    done = run_step(junit, folder, **settings)
    assert done.returncode == 0, done.stdout
    failed = {path.name: len(ElementTree.parse(path).findall(".//failure")) for path in folder.glob("runs/*.xml")}
    assert failed == {"check.xml": failed["check.xml"], "prove.xml": 0}
    assert bool(failed["check.xml"]) == bool(code)
