"""Fixtures of all tests, their distribution to workers, slow tests, and the rule that a CI run skips no test."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.labs import Runs
from tests.slow import slow_of
from tests.warm_ranks import Ranks

# No time limit per example of hypothesis: on a busy machine one took 379 ms, and the default limit is 200 ms.
settings.register_profile("distlab", deadline=None)
settings.load_profile("distlab")

# The longest files, started first so that none runs alone at the end.
MINUTES = (
    "tests/compose/test_fit.py", "tests/compose/test_restart.py", "tests/compose/test_own.py",
    "tests/compose/test_elastic.py", "tests/experiments/test_bugs.py", "tests/experiments/test_proofs.py",
    "tests/test_strangers.py", "tests/lab/cluster/test_elastic_processes.py",
    "tests/tools/testing/test_plugin.py", "tests/tools/check/test_faults.py", "tests/docs/test_outputs.py",
)  # fmt: skip
# Files with few calls on warm ranks: one worker runs all of them, and starts the ranks once.
TOGETHER = (
    "tests/test_strangers.py", "tests/lab/report/test_export.py", "tests/lab/rank/test_link_speed.py",
    "tests/test_lessons.py", "tests/test_warm_ranks.py",
)  # fmt: skip
APART = (
    "tests/tools/check/test_faults.py",
    "tests/docs/test_outputs.py",
    "tests/compose/",
)  # their tests share nothing, so each may run on any worker


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Call functions on warm ranks: `ranks(3, function, *args)`; the ranks start at the first call."""
    pool = Ranks(str(pytestconfig.rootpath), pytestconfig.getini("distlab_preload"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Whole experiments in the pool; each runs once, on the first worker that requests it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "runs"
    folder.mkdir(exist_ok=True)
    return Runs(ranks, folder)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, and deselect them in folders that are named without -m; a named file or test runs completely. In
    parallel (`pytest -n 2 --dist loadgroup`) the tests of a file run in sequence on one worker, the longest files
    first."""
    slow = slow_of(item.nodeid for item in items)
    named = {(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args}
    deselected = []
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
            if not config.option.markexpr and item.path not in named:
                deselected.append(item)
        item.add_marker(pytest.mark.xdist_group(group_of(item.nodeid)))
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    order = {place: number for number, place in enumerate(MINUTES)}
    kept = [item for item in items if item not in deselected]
    items[:] = sorted(kept, key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def group_of(name: str) -> str:
    """Return the group of tests that one worker runs in sequence: a file, whose tests may share results."""
    if name.startswith(APART):
        return name
    file = name.partition("::")[0]
    return TOGETHER[0] if file in TOGETHER else file


def skipped(terminal: pytest.TerminalReporter) -> list[str]:
    """Return the tests that a CI skipped for another reason than a missing GPU, with the reason."""
    if not os.environ.get("CI"):
        return []
    reports = terminal.stats.get("skipped", [])
    reasons = {
        report.nodeid: str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        for report in reports
    }
    return [f"{test}: {reason}" for test, reason in reasons.items() if "GPU" not in reason]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a CI run that skipped tests which could run there."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and skipped(terminal):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = skipped(terminalreporter)
    if missing:
        terminalreporter.section("skipped tests, which a CI does not allow", red=True)
        terminalreporter.write_line("\n".join(missing))
