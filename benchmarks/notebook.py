"""Cells on ranks beside nbdistributed's: the start of four ranks, round trips, an all_reduce, a cell that deadlocks.

    pip install nbdistributed==0.1.0
    python -m benchmarks.notebook [ROUNDS]

Each of the two has a shell of IPython's in a process of its own, and they take turns, cell by cell. Where nbdistributed
is not installed ours is measured alone. A cell that deadlocks is run once each, at most DEADLOCK_S.
"""

import contextlib
import importlib.util
import io
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.rounds import table

ROUNDS, RANKS, START_S, DEADLOCK_S = 20, 4, 120.0, 30.0
EMPTY, SUM = "pass", "t = torch.ones(262_144)\ndist.all_reduce(t)"  # 1 MiB
DEADLOCK = "if rank == 0:\n    dist.all_reduce(torch.ones(1))\nelse:\n    dist.barrier()"
AFTER = "print(1 + 1)"
TARGET_MS = 30.0  # an empty cell


class Product(NamedTuple):
    """What is typed to load it, to start ranks, and above a cell."""

    module: str
    start: tuple[str, str]  # a line magic and its words
    cell: tuple[str, str]  # a cell magic and its words


OURS = Product("distlab", ("ranks", str(RANKS)), ("ranks", ""))
THEIRS = Product("nbdistributed", ("dist_init", f"-n {RANKS}"), ("distributed", ""))


class Answer(NamedTuple):
    """How long a cell took, and what it printed or raised."""

    took_s: float
    said: str


def shell_of(product: Product, line: Connection) -> None:
    """In a process of its own: run what comes as cells; None ends it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from IPython.testing.globalipapp import start_ipython  # a whole shell, without a terminal

    shell: Any = start_ipython()  # type: ignore[no-untyped-call]
    shell.run_line_magic("load_ext", product.module)
    while (source := line.recv()) is not None:
        out, began = io.StringIO(), time.perf_counter()
        said = ""
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                if source == "":
                    shell.run_line_magic(*product.start)
                else:
                    shell.run_cell_magic(*product.cell, source)
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
        line.send(Answer(time.perf_counter() - began, (out.getvalue() + said).strip()))


class Shell:
    """One product's shell, from the outside."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self._line, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=shell_of, args=(product, theirs))
        self._process.start()

    def run(self, source: str, at_most_s: float) -> Answer | None:
        """None where no answer comes in time."""
        self._line.send(source)
        if not self._line.poll(at_most_s):
            return None
        answer: Answer = self._line.recv()
        return answer

    def interrupt(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._line.send(None)
        self._process.join(10)
        self._process.kill()


def main(rounds: int = ROUNDS) -> int:
    """Print the table; 1 where an empty cell of ours takes too long."""
    there = importlib.util.find_spec(THEIRS.module) is not None
    shells = [Shell(product) for product in ([OURS, THEIRS] if there else [OURS])]
    if not there:
        print(f"{THEIRS.module} is not installed: ours is measured alone")
    try:
        starts = [seconds(shell.run("", START_S)) for shell in shells]
        refuse_idle(shells)
        empty, summed = (medians(shells, source, rounds) for source in (EMPTY, SUM))
        hung = [deadlock(shell) for shell in shells]
    finally:
        for shell in shells:
            shell.close()
    names = [shell.product.module for shell in shells]
    rows = [
        [f"start of {RANKS} ranks, s", *(f"{each:.1f}" for each in starts)],
        ["an empty cell, ms", *(f"{1000 * each:.1f}" for each in empty)],
        ["all_reduce of 1 MiB, ms", *(f"{1000 * each:.1f}" for each in summed)],
    ]
    print(table(["median of " + str(rounds), *names], rows))
    for name, what in zip(names, hung, strict=True):
        print(f"{name}, a cell that deadlocks: {what}")
    return int(1000 * empty[0] > TARGET_MS)


def refuse_idle(shells: Sequence[Shell]) -> None:
    """Raises RuntimeError where ranks were asked for and none runs a cell: its times would be those of a refusal."""
    for shell in shells:
        answer = shell.run("print('it runs')", START_S)
        if answer is None or "it runs" not in answer.said:
            said = first_line(answer.said) if answer else "no answer"
            raise RuntimeError(f"{shell.product.module} has started no ranks that run a cell: {said}")


def seconds(answer: Answer | None) -> float:
    if answer is None:
        raise RuntimeError(f"ranks did not start in {START_S:g} s")
    return answer.took_s


def medians(shells: Sequence[Shell], source: str, rounds: int) -> list[float]:
    """Of each shell the median seconds of a cell; they take turns, and the first cell of each is not counted."""
    took: list[list[float]] = [[] for _ in shells]
    for turn in range(rounds + 1):
        for number, shell in enumerate(shells):
            answer = shell.run(source, START_S)
            took[number].append(seconds(answer))
        took = [[] for _ in shells] if turn == 0 else took
    return [statistics.median(each) for each in took]


def deadlock(shell: Shell) -> str:
    """What becomes of a cell that deadlocks, and of the next one."""
    answer = shell.run(DEADLOCK, DEADLOCK_S)
    if answer is None:
        shell.interrupt()
        return f"no answer in {DEADLOCK_S:g} s; {after(shell)}"
    return f"an answer after {answer.took_s:.1f} s, {first_line(answer.said)!r}; {after(shell)}"


def after(shell: Shell) -> str:
    answer = shell.run(AFTER, DEADLOCK_S)
    if answer is None:
        return f"the next cell gave no answer in {DEADLOCK_S:g} s"
    return f"the next cell took {answer.took_s:.1f} s: {first_line(answer.said)!r}"


def first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")[:110]


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
