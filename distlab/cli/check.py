"""`distlab check SCRIPT [ARGS]`: why a distributed script hangs, or computes wrong sums.

`distlab check --dump DIR`: why a job hung on a cluster, from the files that it left.

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

Runs SCRIPT, or the module after -m, unchanged on WORLD_SIZE ranks, as torchrun would. Reports which rank waits for
which at which line, which calls do not match, and the bytes sent from rank to rank. In containers: ./run check SCRIPT;
on ranks that torchrun starts: torchrun --nproc-per-node 4 -m distlab check SCRIPT.

With --dump it runs nothing. It reports why a job hung, from the dumps of torch's flight recorder in DIR (a folder or
files) and from the stacks and logs next to them, and writes a script that hangs in the same way to FILE (repro.py).
--json prints it for tools.

variables   WORLD_SIZE (4), {own}
            and those of a run for paths and limits: LAB_RUNS_DIR, LAB_RUN_ID, LAB_JOIN_TIMEOUT_S, LAB_LOST_AFTER_S, ...
exit codes  0 it ended well and nothing was found, 1 a finding or the script's own failure, 2 refused, 3 a rank lost"""


def main(words: Sequence[str]) -> int:
    """Check the script, or the dumps; returns the exit code."""
    if words and words[0] == "--dump":
        args = dump_parser().parse_args(words)
        from distlab.tools.check.dump.command import diagnose  # no rank needs it

        return diagnose(args.dump, args.repro, CheckOptions.model_fields["hang_after_s"].default, as_json=args.json)
    return start(FileCommand("check", HELP, "script", CheckOptions, SHARED), words)


def dump_parser() -> argparse.ArgumentParser:
    """Return the parser of `--dump`."""
    parser = argparse.ArgumentParser(prog="distlab check", description="Report why a job hung, from what it left.")
    parser.add_argument("--dump", type=Path, nargs="+", metavar="DIR", help="folder or files: dumps, stacks, logs")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument(
        "--repro", type=Path, metavar="FILE", default=Path("repro.py"), help="where to write a script that hangs too"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
