"""Run a command with a time limit; if it does not end, the test fails with the stacks of all its processes."""

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

SETTINGS = re.compile("LAB_|DISTLAB_|RUN_MODE|WORLD_SIZE|RANK|LOCAL_RANK|MASTER_|TORCHELASTIC")
STACKS_S = 15.0  # until all stacks are printed
ONE_S = 5.0  # for the stacks of one process; two processes at once would mix their lines


def clean(**settings: str) -> dict[str, str]:
    """Return this process's variables without settings of a run, and with `settings`."""
    return {name: value for name, value in os.environ.items() if not SETTINGS.match(name)} | settings


def ended(
    command: Sequence[str], *, cwd: Path | None = None, environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Return the ended command; if it does not end, fail the test with its output and all stacks.

    On SIGABRT Python dumps its stacks without the interpreter's lock (faulthandler).
    """
    variables = {**environ, "PYTHONFAULTHANDLER": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cwd, env=variables, stdout=pipe, stderr=pipe, text=True, errors="replace"
    ) as process:
        try:
            output = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            dump_all_stacks(process.pid)
            output = remaining_output(process)
            pytest.fail(f"{' '.join(command)} has not ended after {timeout_s:g} s:\n" + "\n".join(output))
    return subprocess.CompletedProcess(list(command), process.returncode, *output)


def ended_warm(
    module: str, arguments: Sequence[str] = (), *, cwd: Path | None = None, environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Like `ended` for `python -m module arguments`, forked from a process that has imported torch; `stdout` has both
    streams."""
    process, output = Warm(module, arguments, {**environ, "PYTHONFAULTHANDLER": "1"}, cwd), list[str]()
    process.stdin.close()
    reader = threading.Thread(target=lambda: output.extend(process.stdout), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        dump_all_stacks(process.pid)
        reader.join(STACKS_S)
        pytest.fail(f"{module} {' '.join(arguments)} has not ended after {timeout_s:g} s:\n{''.join(output)}")
    finally:
        process.kill()
    reader.join(STACKS_S)
    process.stdout.close()
    return subprocess.CompletedProcess([module, *arguments], code, "".join(output), "")


def dump_all_stacks(process: int) -> None:
    """Make a process and all that it has started dump their stacks, which ends them."""
    launcher, *others = tree(process)
    for each in others:  # so that no process reacts to the end of another
        send(each, signal.SIGSTOP)
    for each in [*reversed(others), launcher]:  # last, because it forwards the others' output
        dump_stacks(each)


def dump_stacks(process: int) -> None:
    """Make a process dump its stacks; returns when it has ended."""
    deadline = time.monotonic() + ONE_S
    send(process, signal.SIGABRT)
    send(process, signal.SIGCONT)
    with suppress(OSError):
        while time.monotonic() < deadline and Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.02)


def send(process: int, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def remaining_output(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=STACKS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def tree(process: int) -> list[int]:
    """Return the process and all its descendants."""
    found = [process]
    for each in found:  # grows meanwhile
        with suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found
