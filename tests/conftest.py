"""Fixtures of all tests, and the rule that a CI leaves none out."""

import os

import pytest

from distlab.testing.warm_ranks import Ranks
from tests.labs import Runs

MINUTES = ("tests/compose/test_fit.py", "tests/compose/test_restart.py")


@pytest.fixture(scope="session")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Whole experiments in the pool; each is made once."""
    return Runs(ranks, tmp_path_factory.mktemp("runs"))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run beside each other (`pytest -n 2 --dist loadgroup`): one pool of ranks, else the tests of a file
    in turn; files of minutes first, so that none is left alone at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(MINUTES))
    for item in items:
        alone = item.nodeid.partition("::")[0]
        if "ranks" in getattr(item, "fixturenames", ()):
            alone = "pool"
        item.add_marker(pytest.mark.xdist_group(alone))


def left_out(terminal: pytest.TerminalReporter) -> list[str]:
    """In a CI, the tests that were skipped for anything but a missing GPU, with the reason."""
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
    """A green run in a CI has tried all that can be tried there."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and left_out(terminal):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = left_out(terminalreporter)
    if missing:
        terminalreporter.section("left out, which a CI does not allow", red=True)
        terminalreporter.write_line("\n".join(missing))
