"""The figures of the pages of modes, one of a small run of each mode, kept in docs/figures/: each is the picture of a
step, or where a mode trains no variant by itself the first figure of its report.

    python docs/site/figures.py           runs all modes, some minutes
    python docs/site/figures.py pp tp     or some
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from distlab.lab.config.settings import modes

TOP = Path(__file__).parents[2]
SMALL = {"LAB_WIDTH": "32", "LAB_DEPTH": "2", "LAB_STEPS": "3", "WORLD_SIZE": "4"}
OWN = {
    "comm": {"LAB_SWEEP_MIB": "0.25"},
    "train": {},
    "elastic": {"LAB_MODEL": "mlp", "LAB_DEPTH": "1", "LAB_STEPS": "8"},
    "largebatch": {"LAB_MODEL": "mlp", "LAB_DEPTH": "1", "LAB_STEPS": "32"},
    "pp": SMALL | {"LAB_DEPTH": "4", "LAB_SLEEP_MS": "30", "LAB_VARIANT": "gpipe,1f1b", "LAB_MICROBATCHES": "8"},
    "mesh": SMALL | {"LAB_DEPTH": "4", "LAB_MESH": "pp2,tp2", "LAB_VARIANT": "1f1b"},
    "fsdp": SMALL | {"LAB_VARIANT": "dp,zero1,zero3"},
}
RUN_S = 200


def main(names: Sequence[str]) -> None:
    """Run each mode and keep its figure."""
    for name in names or modes():
        with tempfile.TemporaryDirectory() as folder:
            drawn = figures_of(name, Path(folder))
            if drawn:
                kept = TOP / "docs" / "figures" / f"{name}.svg"
                kept.parent.mkdir(exist_ok=True)
                shutil.copy(drawn[0], kept)
        print(f"{name:<12}{drawn[0].stem if drawn else 'has no figure'}", flush=True)


def figures_of(name: str, folder: Path) -> list[Path]:
    """The figures of a run of this mode, the picture of a step first."""
    clean = {key: value for key, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE|RANK", key)}
    own = {"RUN_MODE": name, "LAB_RUNS_DIR": str(folder), "LAB_RUN_ID": "drawn", "LAB_LOG": "quiet"}
    environ = clean | OWN.get(name, SMALL) | own
    run = [sys.executable, "-m", "workers"]
    subprocess.run(run, cwd=TOP, env=environ, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL)
    report = [sys.executable, "-m", "distlab", "report", str(folder / "drawn"), "--figures", str(folder / "figures")]
    subprocess.run(report, cwd=TOP, env=clean, check=False, timeout=RUN_S, stdout=subprocess.DEVNULL)
    found = sorted((folder / "figures").glob("*.svg"))
    return sorted(found, key=lambda path: path.stem != "picture")


if __name__ == "__main__":
    main(sys.argv[1:])
