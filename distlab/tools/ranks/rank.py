"""One warm rank of a pool: it waits for a task, runs it, and reports how it ended.

All calls of the task are recorded for the coordinator in the pool's process, as those of a script under `distlab
check`. A thread reads what the pool sends while a task runs. So a rank that waits in C++ for others can be interrupted,
and a rank always ends with the process that owns it.
"""

import _thread
import ctypes
import datetime
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.lab.config.user_code import observe_exits, raise_exited
from distlab.techniques.transport.process_group import TcpBackend
from distlab.techniques.transport.store import KeyedStore
from distlab.tools.check.start.fork_servers import be_main_process, drop_server_pipe
from distlab.tools.check.start.script import PR_SET_PDEATHSIG, answer_stack_requests, flush_streams
from distlab.tools.check.watch.reporter import Reporter, now
from distlab.tools.check.watch.script_error import describe_error
from distlab.tools.check.watch.watchers import install_recorder

STORE_S = 60.0
INTERRUPT = b""  # in place of a task


class Start(NamedTuple):
    """What a rank gets when it is forked."""

    rank: int
    port: int  # of the pool's store
    key: bytes  # its password
    root: str  # its working folder
    path: Sequence[str]  # sys.path
    folder: str  # with the user's files
    executor: "Callable[[Rank], Executor]"


class Group(NamedTuple):
    """A process group: its number in this pool, the prefix of its keys, and a call's time limit."""

    number: int
    world_size: int
    bound_s: float
    backend: str = "gloo"


@dataclass(frozen=True)
class RankResult:
    """How a task ended on a rank: "passed", "failed" or "skipped", and the text."""

    outcome: str
    text: str = ""


class Executor:
    """Runs tasks; there is one on each rank, as long as the rank lives."""

    keeps_group = False  # from task to task

    def __init__(self, rank: "Rank") -> None:
        self.rank = rank

    def run(self, task: Any) -> RankResult:
        """Run the task; exceptions are reported to the coordinator, and formatted by `failed`."""
        raise NotImplementedError

    def failed(self, error: BaseException) -> RankResult:
        raise NotImplementedError

    def interrupt(self) -> None:
        """Make `run` return from its wait; called in another thread."""


class Rank:
    """A rank: the reporter of its calls, the common store, and its process group."""

    def __init__(self, start: Start, reports: int) -> None:
        self.start, self.reporter = start, Reporter(reports)
        self.recorder, self.waits = install_recorder(self.reporter, Path(start.folder), start.port)
        # One for all tasks: with a new store per task every tenth took 5 s.
        self.store = KeyedStore("127.0.0.1", start.port, start.key, STORE_S)

    def join(self, group: Group) -> None:
        """Leave the former group, and make this one with all its ranks."""
        rank, world_size = self.start.rank, group.world_size
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.start.port),
        )  # fmt: skip
        self.leave()
        bound = datetime.timedelta(seconds=group.bound_s)
        keys = dist.PrefixStore(f"group{group.number}", self.store)
        with self.recorder.unseen():
            if group.backend == "tcp":
                TcpBackend("127.0.0.1", self.start.key).register()
            dist.init_process_group(group.backend, store=keys, rank=rank, world_size=world_size, timeout=bound)
            # Otherwise a task without a collective could close its connections before others have opened theirs.
            keys.set(f"joined/{rank}", "")
            keys.wait([f"joined/{other}" for other in range(world_size)], bound)

    def leave(self) -> None:
        if dist.is_initialized():
            with self.recorder.unseen():
                dist.destroy_process_group()

    def run(self, executor: Executor, task: Any) -> RankResult:
        """Run the task and return how it ended, after reporting it to the coordinator."""
        self.recorder.reset()
        self.reporter.send("main", threading.get_ident())
        try:
            result = executor.run(task)
            self.recorder.forget()
            if not executor.keeps_group:
                self.leave()
        except BaseException as error:
            self.reporter.send("raised", *describe_error(error, self.recorder.places.kind), now())
            result = executor.failed(error)
        flush_streams()
        self.reporter.send("ended", int(result.outcome == "failed"), now())
        return result


def set_up_process(start: Start, files: Sequence[Any]) -> int:
    """Set up a new process that can report its stacks; return the file for its reports.

    `files` are the process's ends of its four pipes, and what it prints into.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    drop_server_pipe()
    be_main_process()
    os.setpgid(0, 0)  # so that what a task starts ends with it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reports, stacks, requests, _, output = (each.detach() for each in files)
    answer_stack_requests(requests, stacks)
    os.dup2(output, 1)
    os.dup2(1, 2)
    os.chdir(start.root)
    sys.path[:] = list(start.path)
    torch.set_num_threads(1)
    observe_exits(raise_exited)
    return int(reports)


def serve(start: Start, files: Sequence[Any], control: Connection) -> None:
    """Run tasks until the pool closes the connection."""
    rank = Rank(start, set_up_process(start, files))
    executor = start.executor(rank)
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                data = control.recv_bytes()
                if data == INTERRUPT:
                    executor.interrupt()
                else:
                    tasks.put(data)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)

    _thread.start_new_thread(listen, ())
    control.send(None)
    while True:
        control.send(rank.run(executor, pickle.loads(tasks.get())))
