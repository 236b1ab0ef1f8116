"""Whole runs of the lab as local ranks or in containers, for what its own ledgers measure better than a benchmark
could."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOP = Path(__file__).parent.parent


def run_lab(folder: Path, **settings: object) -> dict[str, Any]:
    """`run.json` of one run into `folder`; raises RuntimeError with what it printed if it did not pass."""
    clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE", name)}
    environ = clean | {name: str(value) for name, value in settings.items()} | {"LAB_RUNS_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "workers"], cwd=TOP, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the run ended with exit code {done.returncode}:\n{done.stdout}")
    run: dict[str, Any] = json.loads((folder / "latest" / "run.json").read_text(encoding="utf-8"))
    return run


def run_in_containers(world_size: int, *overlays: str, **settings: object) -> dict[str, Any]:
    """`run.json` of one run of this tree in containers, image built; raises RuntimeError with the logs if it did not
    pass."""
    files = [part for name in ("docker-compose.yaml", *overlays) for part in ("-f", name)]
    compose = ["docker", "compose", "-p", "distlab-bench", *files]
    clean = {
        name: value for name, value in os.environ.items() if not re.match(r"LAB_|COMPOSE_|RUN_MODE|WORLD_SIZE", name)
    }
    with tempfile.TemporaryDirectory() as folder:
        environ = clean | {"LAB_RUNS_DIR": folder, "WORLD_SIZE": str(world_size)}
        environ |= {name: str(value) for name, value in settings.items()}
        try:
            done = subprocess.run(
                [*compose, "up"], cwd=TOP, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                check=False, timeout=600,
            )  # fmt: skip
        finally:
            subprocess.run([*compose, "down", "--timeout", "0"], cwd=TOP, env=environ, capture_output=True, check=False)
        path = Path(folder) / "latest" / "run.json"
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if run.get("verdict") != "pass":
        raise RuntimeError(f"the run in containers did not pass:\n{done.stdout}")
    return run


def build_image() -> bool:
    """Build the image for `run_in_containers`; False, with a line, where no Docker engine answers."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        print("no Docker engine answers: what takes containers is not measured")
        return False
    subprocess.run(["docker", "compose", "-p", "distlab-bench", "build", "--quiet"], cwd=TOP, check=True)
    return True
