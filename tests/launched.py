"""A command in processes of its own, with a bound: what does not end says where each of its processes stood."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.warm import Warm

ASKS = re.compile("LAB_|DISTLAB_|RUN_MODE|WORLD_SIZE|RANK|LOCAL_RANK|MASTER_|TORCHELASTIC")
STACKS_S = 15.0  # for all of them to be passed on
ONE_S = 5.0  # for one process to say it: two at once on one stream are mixed


def clean(**settings: str) -> dict[str, str]:
    """This process's variables without those that ask a run for something, and these."""
    return {name: value for name, value in os.environ.items() if not ASKS.match(name)} | settings


def ended(
    command: Sequence[str], *, cwd: Path | None = None, environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """The command, once it has ended; fails the test with what it printed and with all stacks where it does not.

    Python dumps its stacks at SIGABRT with no need of the interpreter's lock (faulthandler).
    """
    given = {**environ, "PYTHONFAULTHANDLER": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cwd, env=given, stdout=pipe, stderr=pipe, text=True, errors="replace"
    ) as process:
        try:
            said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            tell_all_stacks(process.pid)
            said = last_words(process)
            pytest.fail(f"{' '.join(command)} has not ended after {timeout_s:g} s:\n" + "\n".join(said))
    return subprocess.CompletedProcess(list(command), process.returncode, *said)


def ended_warm(
    module: str, arguments: Sequence[str] = (), *, cwd: Path | None = None, environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` as `ended` has it, from a process that has imported torch; `stdout` has both
    streams."""
    process, said = Warm(module, arguments, {**environ, "PYTHONFAULTHANDLER": "1"}, cwd), list[str]()
    process.stdin.close()
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        tell_all_stacks(process.pid)
        reader.join(STACKS_S)
        pytest.fail(f"{module} {' '.join(arguments)} has not ended after {timeout_s:g} s:\n{''.join(said)}")
    finally:
        process.kill()
    reader.join(STACKS_S)
    process.stdout.close()
    return subprocess.CompletedProcess([module, *arguments], code, "".join(said), "")


def tell_all_stacks(process: int) -> None:
    """Make it and all that it has started say where they are; all end by it."""
    launcher, *others = tree(process)
    for each in others:  # the end of one is no news for another
        send(each, signal.SIGSTOP)
    for each in [*reversed(others), launcher]:  # which passes on what the others say
        tell_stacks(each)


def tell_stacks(process: int) -> None:
    """Make it say them; returns once it has, by which it ends."""
    deadline = time.monotonic() + ONE_S
    send(process, signal.SIGABRT)
    send(process, signal.SIGCONT)
    with suppress(OSError):
        while time.monotonic() < deadline and Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.02)


def send(process: int, number: signal.Signals) -> None:
    """Nothing if it has ended."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def last_words(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=STACKS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def tree(process: int) -> list[int]:
    """The process, and all that it and its children have started."""
    found = [process]
    for each in found:  # grows meanwhile
        with suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found
