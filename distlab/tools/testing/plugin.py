"""The pytest plugin: run the body of a test marked with `distlab.ranks` on a pool of ranks.

Collection, fixtures, -k, -x, --lf, xdist are pytest's: only the call of the test's function differs. Its arguments
are sent to the ranks, except `rank`, `world_size`, `group` and `mesh`, which each rank makes by itself.
"""

import argparse
import functools
import math
import pickle
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.assertion.rewrite import assertstate_key

from distlab.tools.testing.rank import BodyExecutor, OnRank, Task

if TYPE_CHECKING:
    from distlab.tools.ranks.pool import WarmRanks

POOL = pytest.StashKey["WarmRanks"]()
GRACE_S = 30.0  # for a collective after the test's own bound: the pool ends it before
LAB = {"distlab"}
CASE, PRELOAD = "_distlab_case", "distlab_preload"


def pytest_addoption(parser: pytest.Parser) -> None:
    sizes = "numbers of ranks on which tests marked with @distlab.ranks() run, such as 2,4 (default: 2)"
    parser.getgroup("distlab").addoption("--ranks", type=world_sizes, default=[2], metavar="N,N", help=sizes)
    what = "modules that are imported once, next to torch, before the ranks are forked"
    parser.addini(PRELOAD, what, type="args", default=[])


def world_sizes(text: str) -> list[int]:
    """Parse --ranks; raises ArgumentTypeError, which pytest prints and exits with 4."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of ranks, expected such as 4 or 1,2,4")
    return [int(each) for each in text.split(",")]


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark for --strict-markers, and keep the lab's own asserts unchanged.

    pytest rewrites all of a package that has a plugin, and its loader cannot be run by runpy.
    """
    hook = getattr(config.stash.get(assertstate_key, None), "hook", None)
    if hook is not None:
        hook._must_rewrite -= LAB
        hook._marked_for_rewrite_cache.clear()
    config.addinivalue_line("markers", "ranks(...): the body runs on this many ranks at once (distlab.ranks)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    cases = [
        (world_size, backend, timeout_s)
        for world_size in sizes_of(mark, metafunc.config)
        for backend in mark.kwargs["backends"]
        for timeout_s in mark.kwargs["timeouts_s"]
    ]
    metafunc.fixturenames.append(CASE)
    many = {"backend": len(mark.kwargs["backends"]) > 1, "timeout": len(mark.kwargs["timeouts_s"]) > 1}
    ids = [
        f"{world_size} ranks"
        + (f", {backend}" if many["backend"] else "")
        + (f", {bound:g} s" if many["timeout"] else "")
        for world_size, backend, bound in cases
    ]
    metafunc.parametrize(CASE, cases, ids=ids, indirect=True)


def sizes_of(mark: pytest.Mark, config: pytest.Config) -> list[int]:
    sizes: list[int] = mark.kwargs["world_sizes"]
    mesh: dict[str, int] = mark.kwargs["mesh"]
    requested: list[int] = config.getoption("--ranks")
    return sizes or ([math.prod(mesh.values())] if mesh else requested)


@pytest.fixture
def _distlab_case(request: pytest.FixtureRequest) -> Any:
    """Return world size, backend and bound of a test."""
    return request.param


@pytest.fixture
def rank() -> OnRank:
    """This rank's number, on the rank."""
    return OnRank("rank")


@pytest.fixture
def world_size() -> OnRank:
    """The number of ranks that run the test, on the rank."""
    return OnRank("world_size")


@pytest.fixture
def group() -> OnRank:
    """The test's own process group, on the rank."""
    return OnRank("group")


@pytest.fixture
def mesh() -> OnRank:
    """A DeviceMesh of the axes of `distlab.ranks(..., mesh=...)`, on the rank; without them of one axis, dp."""
    return OnRank("mesh")


@pytest.fixture
def ranks() -> None:
    """Refuse the name: an earlier version's fixture called functions on ranks."""
    pytest.fail("the fixture `ranks` was removed: use @distlab.ranks(3) to run a test on three ranks", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test's body on the ranks."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    from distlab.lab.config import ConfigError

    pool = pool_of(pyfuncitem.config)
    case: Any = pyfuncitem.callspec.params[CASE]
    world_size, backend, timeout_s = case
    task = Task(
        module=pyfuncitem.module.__name__, file=str(pyfuncitem.path), name=name_of(pyfuncitem),
        arguments=arguments_of(pyfuncitem), mesh=mark.kwargs["mesh"],
        group=pool.next_group(world_size, timeout_s + GRACE_S, backend),
    )  # fmt: skip
    try:
        outcome = pool.run([task] * world_size, timeout_s)
    except ConfigError as error:
        pytest.fail(str(error), pytrace=False)
    for number, text in outcome.printed.items():
        if text:
            pyfuncitem.add_report_section("call", f"output of rank {number}", text)
    if outcome.is_bad:
        pytest.fail("\n".join(outcome.lines()), pytrace=False)
    skipped = [each.text for each in outcome.ended.values() if each.outcome == "skipped"]
    if skipped:
        pytest.skip(skipped[0])
    return True


def arguments_of(item: pytest.Function) -> dict[str, Any]:
    """Return the test function's arguments, which must be picklable."""
    names = item._fixtureinfo.argnames
    arguments = {name: item.funcargs[name] for name in names if name != CASE}
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(
                f"the argument {name!r} cannot be sent to a rank ({error}): pass what can be pickled, or create it in"
                " the test's body",
                pytrace=False,
            )
    return arguments


def name_of(item: pytest.Function) -> str:
    holder = f"{item.cls.__qualname__}." if item.cls is not None else ""
    return f"{holder}{item.originalname}"


def pool_of(config: pytest.Config) -> "WarmRanks":
    """Return this process' pool; the first test that needs it starts it."""
    if POOL not in config.stash:
        from distlab.tools.ranks.pool import WarmRanks

        executor = functools.partial(BodyExecutor, [*config.getini("python_files"), "conftest.py"])
        preload = [BodyExecutor.__module__, *config.getini(PRELOAD)]
        config.stash[POOL] = WarmRanks(executor, str(config.rootpath), preload=preload, own_interpreters=True)
    return config.stash[POOL]


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if POOL in session.config.stash:
            session.config.stash[POOL].close()
            del session.config.stash[POOL]
