"""Ranks under real engines, on machines made of this one: what is killed, and what has to come of it.

    python -m benchmarks.engines [torchrun] [slurm]    all by default; the exit code is 1 where something does not hold

Slurm is installed from Debian's packages where it is not there. What ranks and engines said is in the folder that is
named at the end of a drill that failed.
"""

import importlib
import sys
import tempfile
from pathlib import Path

from benchmarks.engines import nodes
from benchmarks.rounds import table

ENGINES = ("torchrun", "slurm")


def main(words: list[str]) -> int:
    """Run the drills of the engines that are named; returns the exit code."""
    unknown = sorted(set(words) - set(ENGINES))
    reason = f"{unknown[0]} is no engine here, allowed: {', '.join(ENGINES)}" if unknown else nodes.missing()
    if reason:
        print(f"refused    {reason}")
        return 2
    rows, failed = [], False
    for engine in words or ENGINES:
        folder = Path(tempfile.mkdtemp(prefix=f"ranklab-{engine}-"))
        folder.chmod(0o755)
        for what, wrong, seconds in importlib.import_module(f"benchmarks.engines.{engine}").drills(folder):
            rows.append([what, f"{seconds:.0f}", "; ".join(wrong) or "held"])
            print(f"{what}: {rows[-1][2]} ({seconds:.0f} s)", flush=True)
            if wrong:
                failed = True
                print(f"what was said: {folder}", flush=True)
    print(table(["drill", "s", ""], rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
