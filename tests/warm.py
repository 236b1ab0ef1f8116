"""Start a Python program with torch already imported: forked from a process that imported it once, else like `python -m`.

Importing torch takes a core for 2 s, and the tests start hundreds of ranks and runs. `Warm` is like `Popen`, as far as
tests need it. It skips the start and end of the interpreter: tests/test_distlab.py, tests/test_standard_streams.py and
tests/test_run.py start the same commands as users do.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any


class Warm:
    """`Warm("tests.lab.cluster.one_rank", arguments, environ)`: its pid, its standard input and its output, both streams in
    one; `Warm("-c", [program, *arguments], environ)` as Python takes it."""

    def __init__(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        child_in, parent_out = os.pipe()
        parent_in, child_out = os.pipe()
        self.stdin, self.stdout = os.fdopen(parent_out, "w"), os.fdopen(parent_in)
        ends = PipeEnds(child_in, child_out)
        self._process = context.Process(target=run, args=(module, arguments, environ, ends, cwd or Path.cwd()))
        self._process.start()
        os.close(child_in)
        os.close(child_out)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code like Popen, None while the program runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class PipeEnds:
    """The program's ends of two pipes, pickled on the way to it."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write

    def __reduce__(self) -> tuple[Any, ...]:
        return received_ends, (reduction.DupFd(self.read), reduction.DupFd(self.write))


def received_ends(read: Any, write: Any) -> PipeEnds:
    """Return the ends in the program."""
    return PipeEnds(read.detach(), write.detach())


def run(module: str, arguments: Sequence[str], environ: Mapping[str, str], ends: PipeEnds, cwd: Path) -> None:
    """Do the same as `python -m module arguments` or `python -c`, with this environment and these streams, in `cwd`."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    for descriptor, number in ((ends.read, 0), (ends.write, 1), (ends.write, 2)):
        os.dup2(descriptor, number)
    os.close(ends.read)
    os.close(ends.write)
    # closefd=False: if the program replaces these files, the descriptors keep their numbers.
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering=1, closefd=False) for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if module == "-c":
        sys.argv = [module, *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
