"""How far N ranks are from one process, for N = 1 to 8: `python -m benchmarks.proof [MODE ...]`.

The proof of dp, fsdp, tp, pp, moe and cp at each world size, all variants that can run, little dividing evenly: the
largest differences of losses, gradients and updated weights in float64. Of mesh every product of dp, tp and pp, and of
dp, cp and tp, with heads, rows and samples that nothing divides and tied weights; the second time the one norm clips,
and AdamW steps.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from benchmarks.rounds import on_ranks, table
from distlab.experiments.mesh import MODE
from distlab.lab.config import Config
from tests.trained import differences as of_variants

TOP = Path(__file__).parent.parent
TARGET = 1e-12
MODES = ("dp", "fsdp", "tp", "pp", "moe", "cp")
MOST_RANKS = 8
SIZES = {"LAB_WIDTH": "24", "LAB_HEADS": "8", "LAB_DEPTH": "8", "LAB_SEQ": "15", "LAB_BATCH": "17", "LAB_STEPS": "1"}
# The batch has two microbatches for each of 8 replicas.
ODD = {
    "LAB_WIDTH": "22", "LAB_HEADS": "11", "LAB_DEPTH": "9", "LAB_SEQ": "11", "LAB_BATCH": "19", "LAB_MICROBATCHES": "2",
    "LAB_BUCKET_MIB": "0.01", "LAB_TIE": "1",
}  # fmt: skip
TUNED = {"LAB_CLIP": "0.05", "LAB_OPTIMIZER": "adamw"}
KINDS = ("losses", "gradients", "weights", "optimizer")
OURS = tuple(name for name in MODE.requested(()).names if name not in MODE.by_torch)


def main(*asked: str) -> None:
    """A row a mode and world size, or of mesh a product; then the worst of all."""
    rows, worst = [], 0.0
    for mode, world_size in itertools.product([mode for mode in MODES if mode in (asked or MODES)], range(1, 9)):
        found = differences(mode, world_size)
        worst = max(worst, *found.values())
        held = "yes" if max(found.values()) <= TARGET else "NO"
        rows.append([mode, world_size, *(f"{value:.1e}" for value in found.values()), f"{TARGET:g}", held])
    if rows:
        print(table(["mode", "ranks", "losses", "gradients", "weights", "target", "held"], rows), flush=True)
    for world_size in range(1, MOST_RANKS + 1) if "mesh" in (asked or ("mesh",)) else ():
        worst = max(worst, *(tell(mesh) for mesh in meshes(world_size)))
    print(f"the worst difference of all: {worst:.1e}")


def differences(mode: str, world_size: int) -> dict[str, float]:
    """The largest difference of each kind over all variants."""
    with tempfile.TemporaryDirectory() as runs:
        clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE", name)}
        environ = clean | SIZES | {"RUN_MODE": mode, "WORLD_SIZE": str(world_size), "LAB_RUNS_DIR": runs}
        subprocess.run([sys.executable, "-m", "workers"], cwd=TOP, env=environ, capture_output=True, check=False)
        run = json.loads((Path(runs) / "latest" / "run.json").read_text(encoding="utf-8"))
    kinds = ("losses", "gradients", "weights")
    return {kind: max(check["max_abs_diff"] for check in run["checks"] if check["name"] == kind) for kind in kinds}


def products(number: int) -> list[tuple[int, int, int]]:
    """All ways to write it as three factors, in their order."""
    sides = range(1, number + 1)
    return [each for each in itertools.product(sides, sides, sides) if math.prod(each) == number]


def meshes(world_size: int) -> list[dict[str, int]]:
    """All products of dp, tp and pp, and those of dp, cp and tp that are none of them."""
    piped = [{"pp": pp, "dp": dp, "tp": tp} for dp, tp, pp in products(world_size)]
    return piped + [{"dp": dp, "cp": cp, "tp": tp} for dp, cp, tp in products(world_size) if cp > 1]


def tell(sizes: dict[str, int]) -> float:
    """Print a product's worst difference of each kind over all variants as soon as it is known; returns the worst."""
    mesh = ",".join(f"{axis}{ranks}" for axis, ranks in sizes.items())
    found = on_ranks(math.prod(sizes.values()), both, mesh)
    kinds: dict[str, float] = {kind: max(worst[kind] for worst in found.values()) for kind in KINDS}
    off = max(kinds.values())
    shown = ", ".join(f"{kind} {value:.1e}" for kind, value in kinds.items())
    held = "held" if off <= TARGET else f"NOT within {TARGET:g}"
    product = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items())
    print(f"mesh {product}, {len(found)} trainings: {shown}: {held}", flush=True)
    return off


def both(group: dist.ProcessGroup, mesh: str) -> dict[str, dict[str, float]]:
    """Every variant of ours that can run, plainly and with what hides errors of scale."""
    found: dict[str, dict[str, float]] = {}
    for how, more in (("plain", {}), ("tuned", TUNED)):
        given = {"RUN_MODE": "mesh", "WORLD_SIZE": str(group.size()), "LAB_MESH": mesh} | ODD | more
        worst = of_variants(group, Config.read(given), OURS)
        found |= {f"{name}, {how}": kinds for name, kinds in worst.items()}
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
