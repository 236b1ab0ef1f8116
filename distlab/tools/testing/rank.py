"""Run a test's body on a warm rank, in its own process group, with asserts rewritten as by pytest."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from _pytest._code import ExceptionInfo
from _pytest.assertion import AssertionState, pytest_assertrepr_compare, util
from _pytest.assertion.rewrite import AssertionRewritingHook, assertstate_key

from distlab.tools.check.start.fork_servers import draw_random_states
from distlab.tools.ranks.rank import Executor, Group, Rank, RankResult

# The test file on a rank, its asserts rewritten as pytest does in its own process.

AUTOLOAD = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"  # other plugins do not affect asserts


def install(patterns: Sequence[str]) -> None:
    """Rewrite asserts of matching modules imported later; explain comparisons as pytest does."""
    autoload = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "1"
    try:  # pytest's settings without a configuration file
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
    """Return a test file's module, imported once."""
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


# What pytest sends to a rank, and what the rank does with it.


@dataclass(frozen=True)
class Task:
    """A test's body for one rank."""

    module: str  # the test file's module, its path, and the name in it: a function, or Class.method
    file: str
    name: str
    arguments: Mapping[str, Any]
    group: Group
    mesh: Mapping[str, int]


@dataclass(frozen=True)
class OnRank:
    """Placeholder of an argument that a rank makes by itself: its group, its mesh, its number."""

    what: str


class BodyExecutor(Executor):
    """Runs bodies; `patterns` name the files in which asserts are rewritten."""

    def __init__(self, patterns: Sequence[str], rank: Rank) -> None:
        super().__init__(rank)
        install(patterns)

    def run(self, task: Task) -> RankResult:
        function = find_function(task)
        draw_random_states()  # undo an earlier test's seed
        self.rank.join(task.group)
        try:
            function(**arguments(self.rank, task))
        except pytest.skip.Exception as skipped:
            return RankResult("skipped", str(skipped))
        return RankResult("passed")

    def failed(self, error: BaseException) -> RankResult:
        """Format the error with pytest's traceback, without frames of libraries."""
        info = ExceptionInfo.from_exception(error)
        user_frames = info.traceback.filter(lambda frame: self.rank.recorder.places.kind(str(frame.path)) == "user")
        info.traceback = user_frames if len(user_frames) else info.traceback
        text = str(info.getrepr(style="long", chain=False))
        return RankResult("failed", text if text[:1].isspace() else f"    {text}")  # line 1 has lost its indentation


def find_function(task: Task) -> Any:
    place: Any = test_module(task.module, task.file)
    for name in task.name.split("."):
        place = getattr(place() if isinstance(place, type) else place, name)
    return place


def arguments(rank: Rank, task: Task) -> dict[str, Any]:
    """Return the test's arguments, with those that this rank makes by itself."""
    world_size = task.group.world_size
    own: dict[str, Any] = {"rank": rank.start.rank, "world_size": world_size, "group": dist.group.WORLD}
    if any(isinstance(value, OnRank) and value.what == "mesh" for value in task.arguments.values()):
        axes = task.mesh or {"dp": world_size}
        sizes = tuple(axes.values())
        own["mesh"] = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))
        # Otherwise a short test could close its groups' connections before others have opened theirs.
        with rank.recorder.unseen():
            dist.barrier()
    return {name: own[value.what] if isinstance(value, OnRank) else value for name, value in task.arguments.items()}
