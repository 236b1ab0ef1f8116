"""A process is killed, stands still and wakes, or gets a share of its core."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest

from distlab.faults import injectors

pytestmark = pytest.mark.timeout(60)
CONTEXT = multiprocessing.get_context("fork")


def in_child(act: Callable[[], None]) -> tuple[int | None, float]:
    """The exit code of a process that does this, and how long it took."""
    began = time.monotonic()
    child = CONTEXT.Process(target=act)
    child.start()
    child.join(30)
    return child.exitcode, time.monotonic() - began


def paused() -> None:
    injectors.pause(0.5)
    os._exit(7)


def slowed() -> None:
    """0.3 s of the core, for a tenth of the time."""
    injectors.slow_down(0.1)
    while time.process_time() < 0.3:
        pass
    os._exit(7)


def test_a_killed_process_says_nothing() -> None:
    assert in_child(injectors.kill)[0] == -signal.SIGKILL


def test_a_pause_ends_by_itself() -> None:
    code, took_s = in_child(paused)
    assert code == 7
    assert took_s > 0.45


def test_a_slow_process_takes_longer_for_the_same() -> None:
    code, took_s = in_child(slowed)
    assert code == 7
    assert took_s > 0.9
