"""A rank of the lab that kills itself once it has come to a step: `python -m tests.workers.cluster.dying_rank PHASE STEP`.

It stands still there for three heartbeats first, so that the others know where it was, however fast the machine is.
"""

import os
import signal
import sys
import time

from workers.__main__ import main
from workers.cluster.pulse import PERIOD_S
from workers.cluster.whereabouts import Whereabouts


def die_at(phase: str, step: int) -> None:
    """Let this process kill itself at `step` of `phase`."""
    at = Whereabouts.at

    def then_die(main_thread: Whereabouts, now: int, where: str) -> None:
        at(main_thread, now, where)
        if where == phase and now >= step:
            time.sleep(3 * PERIOD_S)
            os.kill(os.getpid(), signal.SIGKILL)

    Whereabouts.at = then_die  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    die_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(main())
