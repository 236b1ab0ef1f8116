"""Compressed gradients on a slow link, in containers: `python -m benchmarks.compress [STEPS [VARIANTS]]`.

A GPT of 10M parameters on 2 ranks whose links let 500 Mbit/s through (compose/net.yaml). Every step of a variant stands
beside a step of `dense`, which compresses nothing, of the same round; a figure is the slowest rank's median step over
dense's. Wire bytes are those of the counted pass over the formula, on the rank farthest off, with
nothing allowed for headers.
"""

import sys
from typing import Any

from benchmarks.rounds import judge, table
from benchmarks.runs import build_image, run_in_containers

SETTINGS = {
    "RUN_MODE": "compress", "LAB_NET_RATE": "500mbit", "LAB_WIDTH": "320", "LAB_DEPTH": "8", "LAB_BATCH": "4",
    # the first leaves early, and the next is encoded while it travels
    "LAB_BUCKET_MIB": "8",
    "LAB_PROOF": "0",
}  # fmt: skip
TARGETS = {"fp16": (0.62,), "powersgd": (0.35,), "topk": (0.50,)}  # a step's time over dense's, at most
WIRE_TARGET = 0.02
VARIANTS = ("dense", "fp16", "int8", "topk", "randomk", "powersgd")


def main(steps: str = "12", variants: str = ",".join(VARIANTS)) -> None:
    """Print a row a variant, targets beside the figures."""
    if not build_image():
        return
    settings = SETTINGS | {"LAB_STEPS": steps, "LAB_VARIANT": variants}
    run = run_in_containers(2, "compose/net.yaml", **settings)
    print(f"2 ranks, {SETTINGS['LAB_NET_RATE']} asked for, GPT of 10M parameters")
    print(
        table(
            ["variant", "ms a step", "over dense", "at most", "held", "wire over formula", "at most", "held"], rows(run)
        )
    )


def rows(run: dict[str, Any]) -> list[list[str]]:
    """Of each variant in `run.json`: its step over dense's, and its wire bytes over the formula's."""
    seconds = {variant["name"]: max(variant["step_seconds"]) for variant in run["variants"]}
    wire = {entry["variant"]: entry for entry in run["comparisons"] if entry["name"] == "wire bytes"}
    found = []
    for name, step_s in seconds.items():
        ratio = step_s / seconds["dense"]
        cells = [name, f"{step_s * 1e3:.0f}", f"{ratio:.2f}x", *judge([ratio], TARGETS.get(name, ()))]
        off = wire[name]["measured"] / wire[name]["predicted"] - 1
        found.append([*cells, f"{off:+.2%}", f"{WIRE_TARGET:.0%}", "yes" if abs(off) <= WIRE_TARGET else "NO"])
    return found


if __name__ == "__main__":
    main(*sys.argv[1:3])
