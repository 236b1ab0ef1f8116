"""Bytes of sharded strategies, from the ledgers of whole runs: `python -m benchmarks.ledgers`.

What a step of ours holds at most and sends, over PyTorch's; and of zero1, zero2 and zero3 on 1 to 8 ranks, how far the
wire and the memory at rest are off the formulas. Runs are not proven here (benchmarks.proof does that).
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rounds import judge, table
from benchmarks.runs import run_lab
from benchmarks.steps import FSDP_SIZES, MESH_SIZES, settings

OURS = ("zero1", "zero2", "zero3")
OFF_TARGET = 0.01  # from the formulas
TARGETS = {  # mode: what, of which variant, over which other, at most
    "fsdp": (
        ("peak", "peak_by_class", "zero3", "fsdp2", 1.03),
        ("peak", "peak_by_class", "zero2", "zero1", 1.0),
        ("wire", "wire_bytes", "zero3", "fsdp2", 0.75),
    ),
    "mesh": (
        ("peak", "peak_by_class", "zero2", "dtensor_fsdp2", 1.0),
        ("wire", "wire_bytes", "zero2", "dtensor_fsdp2", 0.6),
    ),
}


def lab_run(mode: str, world_size: int, sizes: dict[str, str]) -> dict[str, Any]:
    """What a whole run counted."""
    with tempfile.TemporaryDirectory() as folder:
        return run_lab(Path(folder), **settings(mode, world_size, sizes), LAB_PROOF=0, LAB_STEPS=1)


def most(run: dict[str, Any], variant: str, source: str) -> float:
    """The largest figure of a variant over its ranks; a peak by class as its sum."""
    (found,) = [entry for entry in run["variants"] if entry["name"] == variant]
    return max(sum(each.values()) if isinstance(each, dict) else each for each in found[source])


def ratio_rows(mode: str, world_size: int, run: dict[str, Any]) -> list[list[Any]]:
    """Peaks and wire bytes against each other."""
    rows = []
    for what, source, one, other, limit in TARGETS[mode]:
        mine, others = most(run, one, source), most(run, other, source)
        shown = [f"{mine / 1e6:.1f} / {others / 1e6:.1f}", f"{mine / others:.3f}x"]
        rows.append([mode, world_size, f"{what} of {one} over {other}", *shown, *judge([mine / others], [limit])])
    return rows


def formula_row(world_size: int, run: dict[str, Any]) -> list[Any]:
    """How far the wire and the memory at rest are off the formulas, each at the variant that is farthest off."""
    off = {"wire bytes": 0.0, "rest bytes": 0.0}
    for entry in run["comparisons"]:
        if entry["name"] in off and entry["variant"] in OURS and entry["predicted"]:
            off[entry["name"]] = max(off[entry["name"]], abs(entry["measured"] / entry["predicted"] - 1))
    return [world_size, *(f"{value:.2%}" for value in off.values()), f"{OFF_TARGET:.0%}",
            "yes" if max(off.values()) <= OFF_TARGET else "NO"]  # fmt: skip


def main() -> None:
    """Print ratios of bytes, and how far all bytes are off the formulas, targets beside them."""
    runs = {world_size: lab_run("fsdp", world_size, FSDP_SIZES) for world_size in range(1, 9)}
    rows = [row for world_size in (2, 4) for row in ratio_rows("fsdp", world_size, runs[world_size])]
    rows += ratio_rows("mesh", 4, lab_run("mesh", 4, MESH_SIZES))
    print("the most that a step of one rank holds, and what it sends, MB")
    print(table(["mode", "ranks", "what", "MB", "ratio", "target", "held"], rows))
    print("off the formulas, of zero1, zero2 and zero3 the one that is farthest off")
    print(table(["ranks", "wire", "at rest", "at most", "held"], [formula_row(*item) for item in runs.items()]))


if __name__ == "__main__":
    main()
