"""One warm rank of a pool: it waits for a test, runs it in a process group of its own, and says how it ended.

All calls of the test are recorded for the doctor in pytest's process, as those of a script under `distlab check`.
"""

import datetime
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from _pytest._code import ExceptionInfo
from _pytest.assertion import AssertionState, pytest_assertrepr_compare, util
from _pytest.assertion.rewrite import AssertionRewritingHook, assertstate_key

from distlab.techniques.transport.process_group import TcpBackend
from distlab.techniques.transport.store import KeyedStore
from distlab.tools.check.start.fork_servers import draw_random_states
from distlab.tools.check.start.script import flush_streams
from distlab.tools.check.watch.places import Places
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.script_error import described
from distlab.tools.check.watch.telling import Telling, now
from distlab.tools.check.watch.watchers import recorded
from distlab.tools.testing.processes import Ended, Start, at_home

# The test file on a rank, its asserts rewritten as pytest does in its own process.

AUTOLOAD = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"  # other plugins have no part in an assert


def install(patterns: Sequence[str]) -> None:
    """Rewrite what is imported from here on and fits; explain comparisons as pytest does."""
    autoload = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "1"
    try:  # pytest's settings as they are without a file of settings
        words = ["-c", os.devnull, "--rootdir", os.curdir, "--noconftest", "-p", "no:cacheprovider"]
        config = pytest.Config.fromdictargs({}, words)
    finally:
        if autoload is None:
            del os.environ[AUTOLOAD]
    config._inicache["python_files"] = list(patterns)
    config.stash[assertstate_key] = AssertionState(config, "rewrite")
    hook = AssertionRewritingHook(config)
    sys.meta_path.insert(0, hook)

    def explained(op: str, left: object, right: object) -> str | None:
        lines = pytest_assertrepr_compare(config, op, left, right)
        return "\n~".join(line.replace("%", "%%") for line in lines) if lines else None

    util._reprcompare = explained


def test_module(name: str, file: str) -> ModuleType:
    """The module of a test file, imported once."""
    hook = next(each for each in sys.meta_path if isinstance(each, AssertionRewritingHook))
    if file not in hook.fnpats:
        hook.fnpats.append(file)  # whatever it is called
    with suppress(ImportError):  # pytest's importmode=importlib: its name is no path
        found = importlib.import_module(name)
        if is_of(found, file):
            return found
    spec = hook.find_spec(name, [str(Path(file).parent)]) or importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def is_of(module: ModuleType, file: str) -> bool:
    return module.__file__ is not None and Path(module.__file__).resolve() == Path(file).resolve()


# What travels between pytest and a rank: a test to run, and how it ended there.


@dataclass(frozen=True)
class Task:
    """A test's body for one rank."""

    module: str  # the test file's module, its path, and the name in it: a function, or Class.method
    file: str
    name: str
    arguments: Mapping[str, Any]
    world_size: int
    number: int  # of the task in this pool: its process group's keys begin with it
    timeout_s: float
    backend: str = "gloo"
    mesh: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OnRank:
    """In the place of an argument that a rank makes by itself: its group, its mesh, its number."""

    what: str


STORE_S = 60.0
GRACE_S = 30.0  # of a collective beyond the test's own bound: the pool ends it before


class Here(NamedTuple):
    """What a rank keeps from test to test."""

    start: Start
    store: dist.Store  # one for all tests: a store made anew for each took 5 s of every tenth
    telling: Telling
    recorder: Recorder


def serve(start: Start, files: Sequence[Any], control: Connection) -> None:
    """Run what comes until nothing does."""
    telling = Telling(at_home(start, files))
    recorder, _ = recorded(telling, Path(start.root), start.port)
    store = KeyedStore("127.0.0.1", start.port, start.key, STORE_S)
    here = Here(start, store, telling, recorder)
    install(start.files)
    control.send(None)
    while (task := control.recv()) is not None:
        recorder.anew()
        telling.say("main", threading.get_ident())
        ended = run(here, task)
        flush_streams()
        telling.say("ended", 0 if ended.outcome != "failed" else 1, now())
        control.send(ended)
    os._exit(0)


def run(here: Here, task: Task) -> Ended:
    try:
        function = find_function(task)
        with here.recorder.unseen():
            begin(here, task)
        function(**arguments(here.start.rank, task))
        here.recorder.forget()
        end(here)
    except pytest.skip.Exception as skipped:
        end(here)
        return Ended("skipped", str(skipped))
    except BaseException as error:
        here.telling.say("raised", *described(error, here.recorder.places.kind), now())
        return Ended("failed", format_traceback(error, here.recorder.places))
    return Ended("passed")


def end(here: Here) -> None:
    if dist.is_initialized():
        with here.recorder.unseen():
            dist.destroy_process_group()


def find_function(task: Task) -> Any:
    place: Any = test_module(task.module, task.file)
    for name in task.name.split("."):
        place = getattr(place() if isinstance(place, type) else place, name)
    return place


def begin(here: Here, task: Task) -> None:
    rank = here.start.rank
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task.world_size), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(here.start.port),
    )  # fmt: skip
    draw_random_states()  # what an earlier test has seeded
    bound = datetime.timedelta(seconds=task.timeout_s + GRACE_S)
    keys = dist.PrefixStore(f"task{task.number}", here.store)
    if task.backend == "tcp":
        TcpBackend("127.0.0.1", here.start.key).register()
    dist.init_process_group(task.backend, store=keys, rank=rank, world_size=task.world_size, timeout=bound)
    # A test without a collective would else end here, and close the connections, while others still make theirs.
    keys.set(f"joined/{rank}", "")
    keys.wait([f"joined/{other}" for other in range(task.world_size)], bound)


def arguments(rank: int, task: Task) -> dict[str, Any]:
    """The test's arguments, with what this rank makes by itself."""
    made: dict[str, Any] = {"rank": rank, "world_size": task.world_size, "group": dist.group.WORLD}
    if any(isinstance(value, OnRank) and value.what == "mesh" for value in task.arguments.values()):
        axes = task.mesh or {"dp": task.world_size}
        sizes = tuple(axes.values())
        made["mesh"] = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))
    return {name: made[value.what] if isinstance(value, OnRank) else value for name, value in task.arguments.items()}


def format_traceback(error: BaseException, places: Places) -> str:
    """The traceback as pytest draws it, of the frames that are no library's."""
    info = ExceptionInfo.from_exception(error)
    own = info.traceback.filter(lambda frame: places.kind(str(frame.path)) == "user")
    info.traceback = own if len(own) else info.traceback
    text = str(info.getrepr(style="long", chain=False))
    return text if text[:1].isspace() else f"    {text}"  # the first line has lost its own
