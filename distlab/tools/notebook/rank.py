"""One warm rank of a notebook: it runs cells in names of its own, which stay, and a process group that all ranks share.

A thread reads what the kernel sends while a cell runs. So a rank that waits in C++ for others can be called back: its
group's connections are shut down, the call raises, and the rank with all its names is there for the next cell.
"""

import _thread
import ast
import datetime
import os
import queue
import re
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.techniques.transport.store import KeyedStore
from distlab.tools.check.start.script import flush_streams
from distlab.tools.check.watch.handles import Waits
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.script_error import described
from distlab.tools.check.watch.telling import Telling, now
from distlab.tools.check.watch.watchers import recorded
from distlab.tools.testing import processes
from distlab.tools.testing.processes import Start, at_home

STORE_S = 60.0
NEVER = datetime.timedelta(days=1)  # a cell may take as long as it likes: the doctor ends what hangs
SHOWN_LETTERS = 20_000  # of a value


class Cell(NamedTuple):
    """What a rank runs; the source is empty on one that takes no part."""

    file: str
    source: str
    measured: bool = False  # whether the bytes and the memory of this cell are asked for


class Join(NamedTuple):
    """Make the process group of this number, of so many ranks."""

    number: int
    world_size: int


GIVEN = {"rank", "world_size", "group", "dist", "torch", "distlab"}  # what each rank has without a cell
BREAK = "break"  # come back from what the cell does


class Frame(NamedTuple):
    """A frame of a traceback: the file's name, the line, the function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Ended(processes.Ended):
    """How a cell ended on a rank, with the value of its last expression, or the frames of what it raised."""

    value: str = ""
    html: str = ""
    frames: list[Frame] = field(default_factory=list)
    before_bytes: int = 0  # of the process, before the cell and at the most
    peak_bytes: int = 0
    names: list[str] = field(default_factory=list)  # that cells have made there, the oldest first


class NotebookRank:
    """A rank: its names, what tells of its calls, and its group."""

    def __init__(self, start: Start, telling: Telling) -> None:
        self.start, self.telling = start, telling
        cells = start.files[0]
        self.recorder: Recorder
        self.waits: Waits
        self.recorder, self.waits = recorded(telling, Path(cells), start.port)
        self.store = KeyedStore("127.0.0.1", start.port, start.key, STORE_S)
        self.main = types.ModuleType("__main__")
        sys.modules["__main__"] = self.main
        self.inside = False  # a cell's code

    def join(self, join: Join) -> None:
        """Leave the group before, and make a new one of all ranks."""
        rank, world_size = self.start.rank, join.world_size
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.start.port),
        )  # fmt: skip
        self.recorder.anew()
        with self.recorder.unseen():
            if dist.is_initialized():
                dist.destroy_process_group()
            keys = dist.PrefixStore(f"group{join.number}", self.store)
            dist.init_process_group("gloo", store=keys, rank=rank, world_size=world_size, timeout=NEVER)
        self.main.__dict__.update(
            rank=rank, world_size=world_size, group=dist.group.WORLD, dist=dist, torch=torch,
            distlab=sys.modules["distlab"],
        )  # fmt: skip

    def names(self) -> list[str]:
        """What cells have defined and imported here, the oldest first."""
        return [name for name in self.main.__dict__ if name not in GIVEN and not name.startswith("_")]

    def run(self, cell: Cell) -> Ended:
        """The cell's code in this rank's names."""
        self.recorder.anew()
        self.telling.say("main", threading.get_ident())
        before, sent = begin_memory() if cell.measured else 0, self.waits.sent() if cell.measured else {}
        ended = self._ended(cell)
        if cell.measured:
            now_sent = {ends: nbytes - sent.get(ends, 0) for ends, nbytes in self.waits.sent().items()}
            self.telling.say("sockets", [(*ends, nbytes) for ends, nbytes in now_sent.items() if nbytes])
        flush_streams()
        self.telling.say("ended", int(ended.outcome == "failed"), now())
        peak = status_bytes("VmHWM") if cell.measured else 0
        return replace(ended, before_bytes=before, peak_bytes=peak, names=self.names())

    def _ended(self, cell: Cell) -> Ended:
        try:
            try:
                self.inside = True
                value = execute(cell, self.main.__dict__)
            finally:
                self.inside = False
            self.recorder.forget()
            return Ended("passed", value=shown(value), html=as_html(value))
        except BaseException as error:
            self.telling.say("raised", *described(error, self.recorder.places.kind), now())
            text = traceback.format_exception_only(error)[-1].strip()  # before it stands the line of a syntax error
            return Ended("failed", text, frames=frames_of(error, cell))

    def on_interrupt(self, *_: Any) -> None:
        if self.inside:
            raise KeyboardInterrupt


def execute(cell: Cell, names: dict[str, Any]) -> Any:
    """Run the source; returns the value of its last expression, None where the last statement is none."""
    tree = ast.parse(cell.source, cell.file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell.file, "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), cell.file, "eval"), names)
    ends_silently = cell.source.rstrip().endswith(";")
    return None if ends_silently else value


def shown(value: Any) -> str:
    """As the last expression of a cell is shown; empty for None."""
    return "" if value is None else repr(value)[:SHOWN_LETTERS]


def as_html(value: Any) -> str:
    """What it has for notebooks itself, as a table of pandas has; else nothing."""
    made = getattr(value, "_repr_html_", None)
    with suppress(Exception):  # a class of the user's, or a type itself
        return str(made() or "")[:SHOWN_LETTERS] if made is not None and not isinstance(value, type) else ""
    return ""


def frames_of(error: BaseException, cell: Cell) -> list[Frame]:
    """The frames from the cell's on; of a syntax error its line."""
    if isinstance(error, SyntaxError) and error.filename == cell.file:
        return [Frame(cell.file, error.lineno or 1, "")]
    found = [Frame(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(error.__traceback__)]
    cells = str(Path(cell.file).parent)
    first = next((number for number, each in enumerate(found) if each.file.startswith(cells)), len(found))
    return found[first:]


def begin_memory() -> int:
    """Forget the peak of the process until now; returns what it has, in bytes."""
    with suppress(OSError):  # it may be forbidden: then the peak is an older one
        Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    with suppress(OSError):
        found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def shut_down(store_port: int) -> None:
    """End all TCP connections of this process but those to the ranks' store: who waits for one of them raises."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            one = socket.socket(fileno=os.dup(int(name)))  # raises OSError where it is no socket
            with one:
                ends = [one.getsockname(), one.getpeername()]
                if one.family in (socket.AF_INET, socket.AF_INET6) and store_port not in (each[1] for each in ends):
                    one.shutdown(socket.SHUT_RDWR)


def serve(start: Start, files: Sequence[Any], control: Connection) -> None:
    """Run what comes until the kernel is gone."""
    one = NotebookRank(start, Telling(at_home(start, files)))
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    main = threading.main_thread().ident
    assert main is not None
    signal.signal(signal.SIGINT, one.on_interrupt)

    def listen() -> None:
        try:
            while True:
                job = control.recv()
                if job == BREAK:
                    shut_down(start.port)
                    signal.pthread_kill(main, signal.SIGINT)
                else:
                    jobs.put(job)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)

    _thread.start_new_thread(listen, ())
    control.send(None)
    while (job := jobs.get()) is not None:
        if isinstance(job, Join):
            one.join(job)
            control.send(None)
        else:
            control.send(one.run(job))
    os._exit(0)
