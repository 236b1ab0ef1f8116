"""`distlab check SCRIPT [ARGS]`: why a distributed script hangs, or sums garbage.

Exit codes: 0 the script ended well and nothing was found; 1 a finding, or the script's own failure; 2 refused; 3 a rank
was lost.
"""

import sys
from collections.abc import Sequence

from distlab.tools.check.start.command import SHARED, CheckOptions, Errand, start

HELP = """usage: distlab check [NAME=VALUE ...] SCRIPT [ARGS ...]

Runs SCRIPT, or the module behind -m, unchanged on WORLD_SIZE ranks, as torchrun would, and says who waits for whom at
which line, which calls do not match, and who sent how many bytes to whom. In containers: ./run check SCRIPT; on ranks
that torchrun starts: torchrun --nproc-per-node 4 -m distlab check SCRIPT.

variables   WORLD_SIZE (4), {own}
            and those of a run that say where: LAB_RUNS_DIR, LAB_RUN_ID, LAB_JOIN_TIMEOUT_S, LAB_LOST_AFTER_S, ...
exit codes  0 it ended well and nothing was found, 1 a finding or the script's own failure, 2 refused, 3 a rank lost"""


def main(words: Sequence[str]) -> int:
    """Check the script; returns the exit code."""
    return start(Errand("check", HELP, "script", CheckOptions, SHARED, lambda config: None), words)  # noqa: ARG005


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
