"""The list of slow tests: its entries exist, and each has a quick test of the same claim."""

import os

import pytest

from tests.docs.pages import TOP
from tests.launched import ended_warm
from tests.slow import SLOW, slow_of


def collected(*places: str) -> list[str]:
    """Return the names of the tests that `pytest PLACES` would run."""
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", *(str(TOP / place) for place in places)]
    found = ended_warm("pytest", words, environ=os.environ, timeout_s=90)
    assert found.returncode == 0, found.stdout
    return [line for line in found.stdout.splitlines() if "::" in line]


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Return all tests in the files of the list."""
    files = sorted({name.partition("::")[0] for pair in SLOW.items() for name in pair})
    return collected(*files)


def test_every_entry_skips_something(names: list[str]) -> None:
    slow = slow_of(names)
    assert [begin for begin in SLOW if not any(name.startswith(begin) for name in slow)] == []


def test_every_slow_test_has_a_quick_counterpart(names: list[str]) -> None:
    quick = set(names) - slow_of(names)
    assert [name for name in SLOW.values() if name not in quick] == []


def test_a_quick_test_is_not_slow_although_its_matrix_is() -> None:
    begin, quick = next(pair for pair in SLOW.items() if pair[1].startswith(pair[0]))
    assert slow_of([quick, f"{begin}[another]", "tests/test_slow.py"]) == {f"{begin}[another]"}


def test_a_folder_is_tested_without_its_slow_tests(names: list[str]) -> None:
    found, slow = collected("tests/tools/puzzle"), slow_of(names)
    assert "tests/tools/puzzle/test_verify.py::test_a_reference_passes_with_each_number_of_ranks[15]" in found
    assert not slow & set(found)
    assert any(name.startswith("tests/tools/puzzle/") for name in slow), "a file that is named is tested whole"
