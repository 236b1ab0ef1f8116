"""A command in processes of its own, with a bound: what does not end says where each of its processes stood."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

STACKS_S = 15.0  # for all of them to say it


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
            for each in reversed(tree(process.pid)):  # the launcher last: it passes on what the others say
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGABRT)
            said = last_words(process)
            pytest.fail(f"{' '.join(command)} has not ended after {timeout_s:g} s:\n" + "\n".join(said))
    return subprocess.CompletedProcess(list(command), process.returncode, *said)


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
