"""`distlab check SCRIPT [ARGS]`: why a distributed script hangs, or sums garbage.

`distlab check --dump DIR`: why a job on a cluster did, from what it left behind.

Exit codes: 0 the script ended well and nothing was found; 1 a finding, or the script's own failure; 2 refused; 3 a rank
was lost.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distlab.tools.check.start.command import SHARED, CheckOptions, FileCommand, start

HELP = """usage: distlab check [NAME=VALUE ...] SCRIPT [ARGS ...]
       distlab check --dump DIR [--json] [--repro FILE]

Runs SCRIPT, or the module behind -m, unchanged on WORLD_SIZE ranks, as torchrun would, and says who waits for whom at
which line, which calls do not match, and who sent how many bytes to whom. In containers: ./run check SCRIPT; on ranks
that torchrun starts: torchrun --nproc-per-node 4 -m distlab check SCRIPT.

With --dump it runs nothing, and says why a job hung from the dumps of torch's flight recorder in DIR (a folder or
files), and from the stacks and logs beside them; FILE (repro.py) becomes a script that hangs alike. --json is
for tools.

variables   WORLD_SIZE (4), {own}
            and those of a run that say where: LAB_RUNS_DIR, LAB_RUN_ID, LAB_JOIN_TIMEOUT_S, LAB_LOST_AFTER_S, ...
exit codes  0 it ended well and nothing was found, 1 a finding or the script's own failure, 2 refused, 3 a rank lost"""


def main(words: Sequence[str]) -> int:
    """Check the script, or the dumps; returns the exit code."""
    if words and words[0] == "--dump":
        asked = dump_parser().parse_args(words)
        from distlab.tools.check.dump.telling import tell  # no rank needs it

        return tell(asked.dump, asked.repro, CheckOptions.model_fields["hang_after_s"].default, as_json=asked.json)
    return start(FileCommand("check", HELP, "script", CheckOptions, SHARED), words)


def dump_parser() -> argparse.ArgumentParser:
    """What `--dump` takes."""
    made = argparse.ArgumentParser(prog="distlab check", description="Say why a job hung, from what it left behind.")
    made.add_argument("--dump", type=Path, nargs="+", metavar="DIR", help="folder or files: dumps, stacks, logs")
    made.add_argument("--json", action="store_true", help="print the verdict as JSON")
    made.add_argument(
        "--repro", type=Path, metavar="FILE", default=Path("repro.py"), help="the script that hangs alike"
    )
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
