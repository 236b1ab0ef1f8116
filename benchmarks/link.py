"""Links as slow as asked: `python -m benchmarks.link [rates|dp]`, in containers of two ranks.

The rate that ranks measure of a shaped link against the one that was asked for, with both ranks sending at once. And on
a link of 500 Mbit/s, a GPT of 10M parameters, our bucketed gradients with the best bucket against PyTorch's with the
same, in one run whose steps take turns, and beside it against PyTorch's with its own best, which is of another run.
The 40 MB alone take 0.65 s there.
"""

import sys
from typing import Any

from benchmarks.rounds import table
from benchmarks.runs import build_image, run_in_containers

RATES = ("10mbit", "100mbit", "500mbit", "1gbit", "2gbit")
RATE_TARGET = 0.06  # of what was asked
BUCKETS_MIB = (1, 4, 25)  # the last is DDP's default
DP_TARGET = 0.97  # of the time of DDP's step
OVERLAY = "compose/net.yaml"
TINY = {"RUN_MODE": "dp", "LAB_MODEL": "line", "LAB_VARIANT": "flat", "LAB_STEPS": 1, "LAB_PROOF": 0}
GPT = {
    "RUN_MODE": "dp",
    "LAB_WIDTH": 320,
    "LAB_BATCH": 4,
    "LAB_PROOF": 0,
    "LAB_VARIANT": "bucketed,ddp",
    "LAB_STEPS": 12,
}


def main(what: str = "") -> None:
    """Print each figure beside its target."""
    if not build_image():
        return
    if what in ("", "rates"):
        print(
            table(
                ["rate asked", "measured, the rank farthest off", "target", "held"],
                [rate(asked) for asked in RATES],
            )
        )
    if what in ("", "dp"):
        rows = [step(mib) for mib in BUCKETS_MIB]
        print("2 ranks, 500 Mbit/s, GPT of 10M parameters: ms a step (median, slowest rank)")
        print(
            table(
                ["MiB a bucket", "bucketed", "ddp", "bucketed / ddp"],
                [[*row, f"{row[1] / row[2]:.2f}x"] for row in rows],
            )
        )
        mib, ours, theirs = min(rows, key=lambda row: row[1])
        held = "yes" if ours / theirs <= DP_TARGET else "NO"
        print(
            f"bucketed with its best bucket, {mib:g} MiB, over ddp in the same run: {ours / theirs:.2f}x, target"
            f" {DP_TARGET:.2f}x, held {held}; over the best of all runs of ddp:"
            f" {ours / min(row[2] for row in rows):.2f}x"
        )


def rate(asked: str) -> list[str]:
    """One line: what a link of that rate was measured to do."""
    run = run_in_containers(2, OVERLAY, LAB_NET_RATE=asked, **TINY)
    compared = {entry["name"]: (entry["measured"], entry["predicted"]) for entry in run["comparisons"]}
    measured, predicted = compared["link rate"]
    return [
        asked,
        within(measured, predicted),
        f"within {RATE_TARGET:.0%}",
        "yes" if abs(measured / predicted - 1) <= RATE_TARGET else "NO",
    ]


def within(measured: float, predicted: float) -> str:
    """Bits a second, and how far off they are."""
    return f"{measured / 1e6:.1f} Mbit/s ({measured / predicted - 1:+.1%})"


def step(mib: float) -> list[float]:
    """Bucket size, and milliseconds of a step of `bucketed` and of `ddp`, whose steps take turns in one run."""
    run = run_in_containers(2, OVERLAY, LAB_NET_RATE="500mbit", LAB_BUCKET_MIB=mib, **GPT)
    return [mib, *(round(1e3 * slowest(run, name), 1) for name in ("bucketed", "ddp"))]


def slowest(run: dict[str, Any], name: str) -> float:
    """Seconds of a variant's median step, on the rank where it is longest."""
    (variant,) = [each for each in run["variants"] if each["name"] == name]
    return float(max(variant["step_seconds"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
