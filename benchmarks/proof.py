"""How far N ranks are from one process, for N = 1 to 8: `python -m benchmarks.proof [MODE ...]`.

The proof of dp, fsdp, tp, pp, moe, cp and mesh at each world size, all variants that can run, little dividing evenly:
the largest differences of losses, gradients and updated weights in float64. Of mesh every product of dp, tp and pp,
with tied weights, where a second proof clips by the one norm and steps AdamW; the last line is the worst of all.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rounds import table

TOP = Path(__file__).parent.parent
TARGET = 1e-12
MODES = ("dp", "fsdp", "tp", "pp", "moe", "cp", "mesh")
MOST_RANKS = 8
SIZES = {"LAB_WIDTH": "24", "LAB_HEADS": "8", "LAB_DEPTH": "8", "LAB_SEQ": "15", "LAB_BATCH": "17", "LAB_STEPS": "1"}
# Heads, rows and samples that no axis divides; the batch has two microbatches for each of 8 replicas.
ODD = {
    "LAB_WIDTH": "22", "LAB_HEADS": "11", "LAB_DEPTH": "9", "LAB_SEQ": "7", "LAB_BATCH": "19", "LAB_MICROBATCHES": "2",
    "LAB_BUCKET_MIB": "0.01", "LAB_TIE": "1", "LAB_CLIP": "0.05", "LAB_OPTIMIZER": "adamw",
}  # fmt: skip
KINDS = ("losses", "gradients", "weights", "clipped gradients", "optimizer state")
COLUMNS = ["mode", "ranks", *KINDS, "target", "held"]


def main(*modes: str) -> None:
    """A row a mode and world size, of mesh one a product; then the worst."""
    rows, worst = [], 0.0
    for mode, world_size, more in runs(modes or MODES):
        found = differences(mode, world_size, more)
        shown = [f"{found[kind]:.1e}" if kind in found else "-" for kind in KINDS]
        off = max(found.values())
        worst = max(worst, off)
        named = more.get("LAB_MESH", str(world_size))
        rows.append([mode, named, *shown, f"{TARGET:g}", "yes" if off <= TARGET else "NO"])
    print(table(COLUMNS, rows))
    print(f"the worst of {len(rows)} runs: {worst:.1e}")


def runs(modes: tuple[str, ...]) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Each run: its mode, world size, and the settings that differ."""
    for mode, world_size in itertools.product(modes, range(1, MOST_RANKS + 1)):
        if mode != "mesh":
            yield mode, world_size, {}
            continue
        for dp, tp, pp in products(world_size):
            yield mode, world_size, ODD | {"LAB_MESH": f"pp{pp},dp{dp},tp{tp}"}


def products(number: int) -> list[tuple[int, int, int]]:
    """All ways to write it as three factors, in their order."""
    sides = range(1, number + 1)
    return [each for each in itertools.product(sides, sides, sides) if math.prod(each) == number]


def differences(mode: str, world_size: int, more: dict[str, str]) -> dict[str, float]:
    """The largest difference of each kind over all variants."""
    run = of(mode, world_size, SIZES | more)
    found = {kind: [each["max_abs_diff"] for each in run["checks"] if each["name"] == kind] for kind in KINDS}
    return {kind: max(values) for kind, values in found.items() if values}


def of(mode: str, world_size: int, settings: dict[str, str]) -> dict[str, Any]:
    """The run.json of a run."""
    with tempfile.TemporaryDirectory() as folder:
        clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE", name)}
        environ = clean | settings | {"RUN_MODE": mode, "WORLD_SIZE": str(world_size), "LAB_RUNS_DIR": folder}
        subprocess.run([sys.executable, "-m", "workers"], cwd=TOP, env=environ, capture_output=True, check=False)
        run: dict[str, Any] = json.loads((Path(folder) / "latest" / "run.json").read_text(encoding="utf-8"))
    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
