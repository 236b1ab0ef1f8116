"""A rank of the lab that kills itself at a step, or stops itself until it gets SIGCONT:
`python -m tests.lab.cluster.dying_rank PHASE STEP [SIGSTOP]`.

It first waits for three heartbeats there, so that the others know its place on any machine.
"""

import os
import signal
import sys
import time

from distlab.cli.run import main
from distlab.lab.cluster.failure_detector import MainThreadProgress
from distlab.lab.cluster.rank_server import PERIOD_S


def die_at(phase: str, step: int, number: signal.Signals) -> None:
    """Let this process send itself a signal at `step` of `phase`, once."""
    at = MainThreadProgress.at

    def then_die(main_thread: MainThreadProgress, now: int, where: str) -> None:
        at(main_thread, now, where)
        if where == phase and now >= step:
            MainThreadProgress.at = at  # type: ignore[method-assign]
            time.sleep(3 * PERIOD_S)
            os.kill(os.getpid(), number)

    MainThreadProgress.at = then_die  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    die_at(sys.argv[1], int(sys.argv[2]), signal.Signals[(sys.argv[3:] or ["SIGKILL"])[0]])
    sys.exit(main())
