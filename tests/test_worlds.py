"""The worlds that neither the pool of ranks nor the container tests reach: 5, 6 and 7 local ranks, uneven everything."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TINY = {"LAB_MODEL": "mlp", "LAB_WIDTH": "24", "LAB_DEPTH": "2", "LAB_STEPS": "3", "LAB_BATCH": "17"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("world_size", [5, 6, 7])
def test_every_world_proves_its_gradients(world_size: int, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE|RANK", name)}
    settings = TINY | {"WORLD_SIZE": str(world_size), "LAB_RUNS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "workers"],
        env=clean | settings,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "latest" / "run.json").read_text())
    assert run["world_size"] == world_size
    proven = {check["variant"] for check in run["checks"] if check["name"] == "gradients" and check["passed"]}
    assert proven == {"naive", "flat", "bucketed", "ring", "ddp"}
