"""Every kind of fault in every mode that trains: what should come of it, and whether it did.

    python -m benchmarks.drills [MODES] [--kinds KINDS] [--at-once RUNS]

Each cell is a run of local processes with one variant, a small model and one text of LAB_FAULTS. "passed": the run
says that it ended as expected. "FAILED": it did not, and why stands below the table. "-": the mode refuses the fault,
and why stands below. Exit code 1 if one failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.rounds import table

RUN_TIMEOUT_S = 240.0
SIZES = {
    "LAB_WIDTH": "16", "LAB_DEPTH": "2", "LAB_HEADS": "4", "LAB_SEQ": "8", "LAB_STEPS": "6", "WORLD_SIZE": "3",
    "MASTER_ADDR": "",
}  # fmt: skip
MODES = {
    "dp": {"LAB_VARIANT": "ring"},
    "tp": {"LAB_VARIANT": "megatron"},
    "pp": {"LAB_VARIANT": "1f1b", "LAB_DEPTH": "3"},
    "fsdp": {"LAB_VARIANT": "zero2"},
    "compress": {"LAB_VARIANT": "powersgd"},
    "precision": {"LAB_VARIANT": "bf16_master"},
    "server": {"LAB_VARIANT": "sync"},
    "largebatch": {"LAB_VARIANT": "linear"},
    "cp": {"LAB_VARIANT": "ring", "LAB_SEQ": "12"},
    "moe": {"LAB_VARIANT": "ep"},
    "mesh": {"LAB_VARIANT": "1f1b", "WORLD_SIZE": "4"},
    "elastic": {"LAB_VARIANT": "shrink", "LAB_LOSSES": "0", "LAB_STEPS": "40"},
}
FAULTS = {
    "kill": "kill:rank1@step2",
    "pause": "pause:rank1:5s@step2",
    "cut": "cut:rank1@step2",
    "cut in": "cut:rank1:in@step2",
    "cut out": "cut:rank1:out@step2",
    "slow": "pause:rank0:500ms@step2,slow_link:rank1:100mbit@step2,slow_rank:rank2:0.5@step2",
    "full disk": "full_disk:rank1@step2",
}
PASSED, FAILED, REFUSED = "passed", "FAILED", "-"
REFUSAL = "refused"  # how its sentence begins


class Cell(NamedTuple):
    """What became of one drill, and why where it did not hold."""

    word: str
    detail: str


def drilled(mode: str, kind: str) -> Cell:
    """One run."""
    own = {"RUN_MODE": mode, "LAB_FAULTS": FAULTS[kind], "LAB_PROOF": "0", "LAB_RUN_ID": "drill"}
    clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE|RANK", name)}
    with tempfile.TemporaryDirectory() as folder:
        environ = clean | SIZES | MODES[mode] | own | {"LAB_RUNS_DIR": folder}
        command = [sys.executable, "-m", "workers"]
        try:
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            return Cell(FAILED, f"no end in {RUN_TIMEOUT_S:g} s: {str(error.stdout)[-300:]}")
        path = Path(folder, "drill", "run.json")
        if done.returncode == 2:
            said = next(line for line in (done.stdout + done.stderr).splitlines() if REFUSAL in line)
            return Cell(REFUSED, said.partition(REFUSAL)[2].strip())
        if not path.exists():
            return Cell(FAILED, f"no run.json, exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        drills = json.loads(path.read_text())["drills"]
    if drills and all(drill["held"] for drill in drills):
        return Cell(PASSED, drills[0]["did"])
    detail = "; ".join(f"{drill['event']}: {drill['did']}, expected: {drill['should']}" for drill in drills)
    return Cell(FAILED, detail or (done.stdout + done.stderr)[-300:])


def main(words: Sequence[str]) -> int:
    """Print the matrix, and a line for each cell that is not "passed"."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drills", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("modes", nargs="*", default=list(MODES), help=f"of {', '.join(MODES)} (all)")
    parser.add_argument("--kinds", nargs="*", default=list(FAULTS), help=f"of {', '.join(FAULTS)} (all)")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time (1)")
    given = parser.parse_args(words)
    if wrong := [each for each in given.modes if each not in MODES] + [
        each for each in given.kinds if each not in FAULTS
    ]:
        parser.error(f"{', '.join(wrong)}: allowed are {', '.join(MODES)}, and of kinds {', '.join(FAULTS)}")
    requested = [(mode, kind) for mode in given.modes for kind in given.kinds]

    def run_and_print(each: tuple[str, str]) -> Cell:
        cell = drilled(*each)
        print(f"{' '.join(each)}: {cell.word}: {cell.detail}", file=sys.stderr, flush=True)
        return cell

    with ThreadPoolExecutor(given.at_once) as pool:
        cells = dict(zip(requested, pool.map(run_and_print, requested), strict=True))
    rows = [[mode, *(cells[mode, kind].word for kind in given.kinds)] for mode in given.modes]
    print(table(["", *given.kinds], rows))
    for (mode, kind), cell in cells.items():
        if cell.word != PASSED:
            print(f"{mode}, {kind}: {cell.detail}")
    return int(any(cell.word == FAILED for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
