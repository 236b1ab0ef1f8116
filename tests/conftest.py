"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of gloo ranks; it starts with the first test that calls it."""
    pool = Ranks()
    yield pool
    pool.close()
