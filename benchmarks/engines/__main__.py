"""Ranks under real engines, on machines made of this one: what is killed, and what has to come of it.

    python -m benchmarks.engines [torchrun] [slurm] [ray]    the first two by default

The exit code is 1 where something does not hold. Slurm is installed from Debian's packages where it is not
there, and Ray from PyPI for the drill alone. What ranks and engines said is in the folder that is named after a drill
that failed; of others it is removed.
"""

import importlib
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.engines import nodes
from benchmarks.rounds import table

DEFAULT = ("torchrun", "slurm")
ENGINES = (*DEFAULT, "ray")


def main(words: list[str]) -> int:
    """Run the drills of the engines that are named; returns the exit code."""
    unknown = sorted(set(words) - set(ENGINES))
    reason = f"{unknown[0]} is no engine here, allowed: {', '.join(ENGINES)}" if unknown else nodes.missing()
    if reason:
        print(f"refused    {reason}")
        return 2
    rows, failed = [], False
    for engine in words or DEFAULT:
        folder = Path(tempfile.mkdtemp(prefix=f"distlab-{engine}-"))
        folder.chmod(0o755)
        drills = importlib.import_module(f"benchmarks.engines.{engine}").drills(folder)
        rows += [[drill.what, f"{drill.seconds:.0f}", "; ".join(drill.wrong) or "held"] for drill in drills]
        if any(drill.wrong for drill in drills):
            failed = True
            print(f"what was said: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    print(table(["drill", "s", ""], rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
