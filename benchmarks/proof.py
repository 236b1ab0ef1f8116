"""How far N ranks are from one process, for N = 1 to 8: `python -m benchmarks.proof`.

The proof of dp, fsdp, tp, pp and moe at each world size, all variants that can run, little dividing evenly: the largest
differences of losses, gradients and updated weights in float64.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rounds import table

TOP = Path(__file__).parent.parent
TARGET = 1e-12
MODES = ("dp", "fsdp", "tp", "pp", "moe")
SIZES = {"LAB_WIDTH": "24", "LAB_HEADS": "8", "LAB_DEPTH": "8", "LAB_SEQ": "15", "LAB_BATCH": "17", "LAB_STEPS": "1"}


def main() -> None:
    """A row a mode and world size."""
    rows = []
    for mode, world_size in itertools.product(MODES, range(1, 9)):
        worst = differences(mode, world_size)
        held = "yes" if max(worst.values()) <= TARGET else "NO"
        rows.append([mode, world_size, *(f"{value:.1e}" for value in worst.values()), f"{TARGET:g}", held])
    print(table(["mode", "ranks", "losses", "gradients", "weights", "target", "held"], rows))


def differences(mode: str, world_size: int) -> dict[str, float]:
    """The largest difference of each kind over all variants."""
    with tempfile.TemporaryDirectory() as runs:
        clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE", name)}
        environ = clean | SIZES | {"RUN_MODE": mode, "WORLD_SIZE": str(world_size), "LAB_RUNS_DIR": runs}
        subprocess.run([sys.executable, "-m", "workers"], cwd=TOP, env=environ, capture_output=True, check=False)
        run = json.loads((Path(runs) / "latest" / "run.json").read_text(encoding="utf-8"))
    kinds = ("losses", "gradients", "weights")
    return {kind: max(check["max_abs_diff"] for check in run["checks"] if check["name"] == kind) for kind in kinds}


if __name__ == "__main__":
    main()
