"""Fork all ranks from one interpreter: with one each, the start takes 2 s more of a core per rank.

tests/tools/check/start/test_fork_servers.py has the differences.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        yield
