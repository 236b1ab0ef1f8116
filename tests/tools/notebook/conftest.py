"""One interpreter for all ranks: with one each the start takes 2 s of a core a rank more (tests/tools/check/start/test_fork_servers.py
has what differs)."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        yield
