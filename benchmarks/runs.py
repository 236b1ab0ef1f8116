"""Whole runs of the lab as local ranks, for what its own ledgers measure better than a benchmark could."""

import json
import os
import re
import subprocess
import sys
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
