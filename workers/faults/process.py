"""A rank's process is killed, stands still for a while, or gets less of its core: all by the kernel.

The rank is stopped by SIGSTOP, which no thread of it sees. A process that stands still cannot wake itself: a small
shell beside it does, and sleeps until then.
"""

import os
import signal
import subprocess

TURN_S = 0.1  # in which a slow rank runs for its share, and stands still for the rest: no heartbeat is late by it
WAKE = 'sleep "$1"; kill -CONT "$0"'
SLOW = 'while kill -STOP "$0" 2>/dev/null && sleep "$1" && kill -CONT "$0"; do sleep "$2"; done'


def kill() -> None:
    """End this process as the kernel does where memory is short: at once, and nothing of it says a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def pause(duration_s: float) -> None:
    """Stand still, all threads of this process."""
    _beside(WAKE, duration_s)
    os.kill(os.getpid(), signal.SIGSTOP)


def slow_down(share: float) -> None:
    """From now on run for `share` of the time: what a neighbour does that takes the rest of the core."""
    _beside(SLOW, TURN_S * (1 - share), TURN_S * share)


def _beside(script: str, *seconds: float) -> None:
    subprocess.Popen(
        ["sh", "-c", script, str(os.getpid()), *(f"{each:.3f}" for each in seconds)], cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
