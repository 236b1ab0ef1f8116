"""An interpreter for each rank, from which its processes are forked: it has imported torch, and has a hash seed of its
own.

Under torchrun each rank is a new interpreter, and the order of a set of strings is another on each. What is forked from
one interpreter has one order, which nothing can change later. So each rank has a server of its own, multiprocessing's
forkserver: it imports torch while the launcher does, and what it forks after a failure is there in a tenth of a second.
With PYTHONHASHSEED set all ranks have one order under torchrun too, and one interpreter is enough.
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


def is_one_for_all() -> bool:
    """Whether each new interpreter has the same hash seed."""
    return os.environ.get("PYTHONHASHSEED", "random") != "random"


class TravellingFiles:
    """Open files on their way to another process, which gets a tuple of what gives a descriptor by `detach`."""

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ([reduction.DupFd(each) for each in self._descriptors],)


class ForkServer:
    """One interpreter that has imported `preload` and forks; `start` it before it is needed.

    It ends once each process that has it, and each that it forked, has closed it or ended.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._server: Any = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(preload))

    def start(self) -> None:
        """Nothing if it runs."""
        self._server.ensure_running()

    def adopt(self) -> None:
        """In a process that was forked from the one that started it: use it, and do not ask how it is, which its parent
        alone can."""
        self._server.ensure_running = lambda: None

    def close(self) -> None:
        """Let go of it."""
        if self._server._forkserver_alive_fd is not None:
            os.close(self._server._forkserver_alive_fd)
            self._server._forkserver_alive_fd = None

    def started(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> process.BaseProcess:
        """A process that calls target(*args), which travel to it."""
        found = ForkServerProcess(target=target, args=args, name=name, daemon=True)
        with self._asked():
            found.start()
        return found

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Have multiprocessing ask this server, and the new process import no main module of ours."""
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


def leave_to_others() -> None:
    """In a process that a server has forked: close its end of the pipe by which the server knows that it is needed.

    multiprocessing gives one to each process, so that it may fork others there. Then whoever started the server and is
    killed leaves a server that its own processes keep alive; without, they end with it.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def be_main_process() -> None:
    """Be as a process that nobody has forked is: by multiprocessing's word, and by its random states."""
    ours: Any = process
    ours._parent_process = None
    me: Any = process.current_process()
    me._identity, me._name = (), "MainProcess"
    me._config.pop("daemon", None)  # it may have children
    set_start_method(None, force=True)  # the script has not chosen one yet
    draw_random_states()


def draw_random_states() -> None:
    """What a new process begins with; of CUDA's generators that is one constant, which a fork leaves as it is."""
    random.seed()
    for name in ("torch", "numpy"):
        module: Any = sys.modules.get(name)
        if module is not None:
            (module.default_generator if name == "torch" else module.random).seed()
