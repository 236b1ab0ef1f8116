"""An interpreter for each rank from which its processes are forked, with torch imported and its own hash seed.

Under torchrun each rank is a new interpreter, and the order of a set of strings differs between ranks. Processes forked
from one interpreter have the same order, which cannot be changed later. So each rank has its own server,
multiprocessing's forkserver: it imports torch while the launcher does, and forks again after a failure in a tenth of a
second. With PYTHONHASHSEED all ranks have one order under torchrun too, and one interpreter is enough.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, process, reduction, set_start_method
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any


def has_fixed_hash_seed() -> bool:
    """Return whether each new interpreter has the same hash seed."""
    return os.environ.get("PYTHONHASHSEED", "random") != "random"


class FilesToSend:
    """Open files for another process, which gets a tuple of objects with `detach`."""

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ([reduction.DupFd(each) for each in self._descriptors],)


class ForkServer:
    """One interpreter that has imported `preload` and forks; `start` it before it is needed.

    It ends once all processes with its pipe, including forked ones, have closed it or ended.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._server: Any = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(preload))

    def start(self) -> None:
        """Start it, unless it runs."""
        self._server.ensure_running()

    def adopt(self) -> None:
        """Use it in a process forked from its starter, without checking its state, which only the parent can do."""
        self._server.ensure_running = lambda: None

    def close(self) -> None:
        """Release it."""
        if self._server._forkserver_alive_fd is not None:
            os.close(self._server._forkserver_alive_fd)
            self._server._forkserver_alive_fd = None

    def start_process(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> process.BaseProcess:
        """Return a process that calls target(*args), which are sent to it."""
        child = ForkServerProcess(target=target, args=args, name=name, daemon=True)
        with self._in_use():
            child.start()
        return child

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Make multiprocessing use this server, and keep the new process from importing our main module."""
        module: Any = forkserver
        connect, main = module.connect_to_new_process, sys.modules["__main__"]
        module.connect_to_new_process, sys.modules["__main__"] = (
            self._server.connect_to_new_process,
            ModuleType("__main__"),
        )
        try:
            yield
        finally:
            module.connect_to_new_process, sys.modules["__main__"] = connect, main


def drop_server_pipe() -> None:
    """In a process that a server has forked, close its end of the pipe that keeps the server alive.

    multiprocessing gives one to each process, so that it can fork others. If the starter were killed, the server's own
    processes would keep it alive; without the pipe it ends with them.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def be_main_process() -> None:
    """Look like a process that was not forked: to multiprocessing, and in its random states."""
    ours: Any = process
    ours._parent_process = None
    me: Any = process.current_process()
    me._identity, me._name = (), "MainProcess"
    me._config.pop("daemon", None)  # it may have children
    set_start_method(None, force=True)  # the script has not chosen one yet
    draw_random_states()


def draw_random_states() -> None:
    """Set the random states of a new process; CUDA generators begin with a constant, which a fork keeps."""
    random.seed()
    for name in ("torch", "numpy"):
        module: Any = sys.modules.get(name)
        if module is not None:
            (module.default_generator if name == "torch" else module.random).seed()
