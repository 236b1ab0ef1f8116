"""Run cells on a warm rank, in a persistent namespace, with a process group that all ranks share.

A rank that waits in C++ for others can be interrupted: its group's connections are shut down, the call raises, and the
rank keeps all its names for the next cell.
"""

import ast
import os
import re
import signal
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.tools.ranks import rank as ranks

MAX_LETTERS = 20_000  # of a value


class Cell(NamedTuple):
    """A cell for a rank; the source is empty on a rank that does not take part."""

    file: str
    source: str
    measured: bool = False  # whether to measure this cell's bytes and memory


PREDEFINED = {"rank", "world_size", "group", "dist", "torch", "distlab"}  # names that each rank has from the start


class Frame(NamedTuple):
    """A frame of a traceback: the file's name, the line, the function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class RankResult(ranks.RankResult):
    """How a cell ended on a rank, with the value of its last expression, or the frames of what it raised."""

    value: str = ""
    html: str = ""
    frames: list[Frame] = field(default_factory=list)
    before_bytes: int = 0  # of the process, before the cell and at its peak
    peak_bytes: int = 0
    names: list[str] = field(default_factory=list)  # defined by cells, oldest first


class Cells(ranks.Executor):
    """Runs cells, which are files of `start.folder`; a task that is a group is joined instead."""

    keeps_group = True

    def __init__(self, rank: ranks.Rank) -> None:
        super().__init__(rank)
        self.main = types.ModuleType("__main__")
        sys.modules["__main__"] = self.main
        self.is_running = False  # whether a cell's code runs
        signal.signal(signal.SIGINT, self.on_interrupt)

    def run(self, task: Cell | ranks.Group) -> ranks.RankResult:
        """Run the cell's code in this rank's namespace."""
        if isinstance(task, ranks.Group):
            return self.join(task)
        waits = self.rank.waits
        before_bytes, sent_before = (begin_memory(), waits.sent_bytes()) if task.measured else (0, {})
        try:
            self.is_running = True
            value = execute(task, self.main.__dict__)
        finally:
            self.is_running = False
        if task.measured:
            sent_bytes = {ends: nbytes - sent_before.get(ends, 0) for ends, nbytes in waits.sent_bytes().items()}
            self.rank.reporter.send("sockets", [(*ends, nbytes) for ends, nbytes in sent_bytes.items() if nbytes])
        peak_bytes = status_bytes("VmHWM") if task.measured else 0
        return RankResult(
            "passed", value=as_text(value), html=as_html(value), before_bytes=before_bytes, peak_bytes=peak_bytes,
            names=self.names(),
        )  # fmt: skip

    def join(self, group: ranks.Group) -> ranks.RankResult:
        self.rank.join(group)
        self.main.__dict__.update(
            rank=self.rank.start.rank, world_size=group.world_size, group=dist.group.WORLD, dist=dist, torch=torch,
            distlab=sys.modules["distlab"],
        )  # fmt: skip
        return ranks.RankResult("passed")

    def names(self) -> list[str]:
        """Return what cells have defined and imported here, oldest first."""
        return [name for name in self.main.__dict__ if name not in PREDEFINED and not name.startswith("_")]

    def failed(self, error: BaseException) -> RankResult:
        text = traceback.format_exception_only(error)[-1].strip()  # after the line of a syntax error
        return RankResult("failed", text, frames=frames_of(error, self.rank.start.folder), names=self.names())

    def interrupt(self) -> None:
        """Shut down the group's connections, and interrupt computation."""
        shut_down(self.rank.start.port)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    def on_interrupt(self, *_: Any) -> None:
        if self.is_running:
            raise KeyboardInterrupt


def execute(cell: Cell, names: dict[str, Any]) -> Any:
    """Run the source; returns the last expression's value, None if the last statement is none."""
    tree = ast.parse(cell.source, cell.file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell.file, "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), cell.file, "eval"), names)
    ends_silently = cell.source.rstrip().endswith(";")
    return None if ends_silently else value


def as_text(value: Any) -> str:
    """Return a cell's last value as text; empty for None."""
    return "" if value is None else repr(value)[:MAX_LETTERS]


def as_html(value: Any) -> str:
    """Return its own HTML, as pandas' tables have; else an empty text."""
    render = getattr(value, "_repr_html_", None)
    with suppress(Exception):  # a user's class, or a type itself
        return str(render() or "")[:MAX_LETTERS] if render is not None and not isinstance(value, type) else ""
    return ""


def frames_of(error: BaseException, cells: str) -> list[Frame]:
    """Return the frames from a cell of folder `cells` on; of a syntax error its line."""
    if isinstance(error, SyntaxError) and error.filename and error.filename.startswith(cells):
        return [Frame(error.filename, error.lineno or 1, "")]
    found = [Frame(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(error.__traceback__)]
    first = next((number for number, each in enumerate(found) if each.file.startswith(cells)), len(found))
    return found[first:]


def begin_memory() -> int:
    """Reset the process' peak memory; returns its current bytes."""
    with suppress(OSError):  # it may be forbidden: then the peak is an older one
        Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    with suppress(OSError):
        found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def shut_down(store_port: int) -> None:
    """Shut down this process' TCP connections except to the ranks' store: calls that wait for one raise."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            one = socket.socket(fileno=os.dup(int(name)))  # raises OSError if it is no socket
            with one:
                ends = [one.getsockname(), one.getpeername()]
                if one.family in (socket.AF_INET, socket.AF_INET6) and store_port not in (each[1] for each in ends):
                    one.shutdown(socket.SHUT_RDWR)
