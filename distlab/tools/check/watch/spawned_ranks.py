"""Scripts that start their own ranks: torch.multiprocessing.spawn, multiprocessing.Process, a pool or a launcher.

Under check each rank is a process already. So a function that creates a process group is called in this process, with
this rank's arguments, and joins the others at their store, whatever address the script wanted. What cannot be replaced
in this way is refused with a message: a pool's worker takes any task, and a launcher's ranks are not check's. Processes
that create no group (a loader, a helper) start as usual.
"""

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import process
from multiprocessing.pool import Pool, ThreadPool
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch.distributed as dist
import torch.multiprocessing

from distlab.tools.check.watch.patches import Function, Patch, before, put
from distlab.tools.check.watch.recorder import Recorder

MAKERS = {"init_process_group", "init_device_mesh", "Accelerator", "PartialState"}  # create the group of all ranks
MOST_FUNCTIONS = 300  # functions that are searched
LAUNCHERS = {"torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch"}
POOL_METHODS: dict[type, tuple[str, ...]] = {  # methods whose first argument is a function for a process of the pool
    Pool: ("apply_async", "_map_async", "imap", "imap_unordered"), ProcessPoolExecutor: ("submit", "map"),
}  # fmt: skip
INSTEAD = (
    "check starts one process per rank already, with RANK and WORLD_SIZE: call the function with"
    ' int(os.environ["RANK"]) instead'
)
SHARED = ("queues", "connection", "synchronize", "sharedctypes", "managers")  # of multiprocessing: need a parent


class EndedProcess:
    """Replaces a started process: one that has ended well."""

    returncode = 0

    def __init__(self) -> None:
        self.pid, self.sentinel = os.getpid(), os.open(os.devnull, os.O_RDONLY)  # always readable

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return 0

    poll = wait

    def close(self) -> None:
        os.close(self.sentinel)

    def terminate(self) -> None:
        pass

    kill = terminate


class EndedRanks:
    """The result of `spawn(..., join=False)`: ranks that have ended."""

    processes: tuple[()] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:  # noqa: ARG002
        return True

    def pids(self) -> list[int]:
        return []


class SpawnedRanks:
    """Observes this process; `install` once, when RANK, WORLD_SIZE and the address are set by check."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._reporter = recorder, recorder.reporter
        self._rank, self._world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._started = 0  # ranks that the script would have started so far
        self._all_started = False  # whether it has started a full world once; later it may start fewer
        self._start_line = ""  # the line that starts them

    def install(self) -> None:
        rendezvous = importlib.import_module("torch.distributed.rendezvous")
        put(
            Patch(sys.modules["torch.multiprocessing.spawn"], "start_processes", self._spawn),
            Patch(torch.multiprocessing, "start_processes", self._spawn),
            Patch(process.BaseProcess, "start", self._start),
            *(Patch(pool, name, partial(self._submit, pool)) for pool, names in POOL_METHODS.items() for name in names),
            Patch(subprocess.Popen, "__init__", before(self._refuse_launcher)),
            Patch(rendezvous, "_create_c10d_store", self._open_store),
        )

    def _spawn(
        self, start: Function, fn: Any, args: Iterable[Any] = (), nprocs: int = 1, join: bool = True, *more: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        """Replace `torch.multiprocessing.spawn`, whose function gets the rank as first argument."""
        if self._group_is_there() or not makes_group(fn, self._is_own):
            self._report_start()
            return start(fn, args, nprocs, join, *more, **named)
        arguments = tuple(args)
        self._note_start("torch.multiprocessing.spawn", arguments)
        self._started = nprocs
        self._refuse_other_size(nprocs)
        if self._rank < nprocs:
            with self._as_its_own_process():
                fn(self._rank, *arguments)
        return None if join else EndedRanks()

    def _start(self, start: Function, child: Any) -> None:
        """Replace `multiprocessing.Process.start`: the n-th process that creates a group is rank n."""
        target = child._target if type(child).run is process.BaseProcess.run else type(child).run
        if (self._group_is_there() and not self._started) or not makes_group(target, self._is_own):
            if (function := python_function(target)[0]) is not None and self._is_own(function.__code__.co_filename):
                self._report_start()
            start(child)
            return
        if not self._started:
            self._note_start("multiprocessing.Process", (*child._args, *child._kwargs.values()))
        self._started += 1
        child._popen = EndedProcess()
        if self._started == self._rank + 1:
            with self._as_its_own_process():
                child.run()

    def _submit(self, pool: type, method: Function, instance: Any, *args: Any, **named: Any) -> Any:
        """Replace a method that passes a function to a pool's process."""
        function = args[0] if args else named.get("func", named.get("fn"))
        if not isinstance(instance, ThreadPool) and not self._group_is_there() and makes_group(function, self._is_own):
            place = self._recorder.places.line_of(2)
            self._refuse(f"the script starts its own ranks in a {pool.__name__} at {place}; {INSTEAD}")
        return method(instance, *args, **named)

    def _refuse_launcher(self, popen: Any, args: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Replace `subprocess.Popen`, if the command is a launcher's."""
        if (launcher := launcher_in(args)) and not self._group_is_there():
            place = self._recorder.places.line_of(2)
            self._refuse(
                f"the script starts its own ranks at {place} by {launcher}, which check cannot observe: run check on"
                f" the script that {launcher} starts"
            )

    def _group_is_there(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def _is_own(self, file: str) -> bool:
        return self._recorder.places.kind(file) == "user"

    def _report_start(self) -> None:
        """Report a process that creates no visible group: the reason if there is none at the end."""
        self._reporter.send("starts", self._recorder.places.here(3)[0])

    def _note_start(self, by: str, arguments: Iterable[Any]) -> None:
        place = self._recorder.places.line_of(3)
        self._start_line = place
        shared = next((each for each in arguments if type(each).__module__.split(".")[-1] in SHARED), None)
        if shared is not None:
            self._refuse(
                f"the ranks that {by} starts at {place} share a multiprocessing {type(shared).__name__} with the"
                " process that starts them, and check has no such process: let each rank read RANK and WORLD_SIZE from"
                " its environment, as under torchrun, and send objects by torch.distributed (gather_object)"
            )
        self._reporter.send(
            "changed",
            f"the script starts its own ranks at {place} ({by}): under check each rank calls that function itself",
        )

    def _refuse_other_size(self, size: int) -> None:
        self._all_started = self._all_started or size == self._world_size
        if size != self._world_size and not (self._all_started and 0 < size < self._world_size):
            also = ": is that its number of GPUs, which is 0 here?" if size == 0 else f": run it with WORLD_SIZE={size}"
            self._refuse(
                f"the script starts {size} ranks of its own at {self._start_line}, but check runs"
                f" {self._world_size}{also}"
            )

    def _refuse(self, sentence: str) -> NoReturn:
        self._reporter.send("refused", sentence)
        raise SystemExit(2)

    @contextmanager
    def _as_its_own_process(self) -> Iterator[None]:
        """Turn sys.exit(0) into the end of this rank's function."""
        try:
            yield
        except SystemExit as error:
            if error.code:
                raise

    def _open_store(self, create: Function, host: str, port: int, rank: int, world_size: int, *more: Any) -> dist.Store:
        """Return the store of an `init_process_group`: for replaced ranks that of all ranks of the check."""
        if self._start_line:
            self._refuse_other_size(world_size)
            host, port = self._address
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        store: dist.Store = create(host, port, rank, world_size, *more)
        return store


def launcher_in(command: Any) -> str:
    """Return the launcher that is a command's program, or python's module; empty without one."""
    words = command.split() if isinstance(command, str) else [command] if isinstance(command, PurePath) else command
    names = [PurePath(os.fsdecode(each)).name for each in [*words][:6]]
    module = names[names.index("-m") + 1 :][:1] if "-m" in names else []
    return next((each for each in [*names[:1], *module] if each in LAUNCHERS), "")


def python_function(function: Any) -> tuple[FunctionType | None, Any]:
    """Return the function that a call of this runs, and its class for a method; None if it is not Python."""
    while isinstance(function, partial):
        function = function.func
    owner: Any = None
    if isinstance(function, MethodType):
        owner, function = type(function.__self__), function.__func__
    elif isinstance(function, type):
        owner, function = function, vars(function).get("__init__")
    elif not isinstance(function, FunctionType):
        owner, function = type(function), vars(type(function)).get("__call__")
    return (function if isinstance(function, FunctionType) else None), owner


def makes_group(function: Any, is_own: Callable[[str], bool]) -> bool:
    """Return whether the function, or one of the script's that it names, creates the group of all ranks."""
    pending, seen = [python_function(function)], set[FunctionType]()
    while pending and len(seen) < MOST_FUNCTIONS:
        one, owner = pending.pop()
        if one is None or one in seen or not is_own(one.__code__.co_filename):
            continue
        seen.add(one)
        names = names_in(one.__code__)
        if names & MAKERS:
            return True
        pending += [(each, owner) for each in functions_named(owner, names)]
        for value in [*(one.__globals__.get(name) for name in names), *inspect.getclosurevars(one).nonlocals.values()]:
            if not isinstance(value, ModuleType):
                pending.append(python_function(value))
            holder = value if isinstance(value, (type, ModuleType)) else type(value)
            pending += [(each, holder) for each in functions_named(holder, names)]
    return False


def functions_named(holder: Any, names: set[str]) -> list[FunctionType]:
    """Return the functions of a class or a module with one of these names."""
    found = [inspect.getattr_static(holder, name, None) for name in names] if holder is not None else []
    found = [getattr(each, "__func__", each) for each in found]  # for class methods and static methods
    return [each for each in found if isinstance(each, FunctionType)]


def names_in(code: CodeType) -> set[str]:
    """Return all names that it uses, also in nested functions."""
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= names_in(each)
    return found
