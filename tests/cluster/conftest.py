"""A fixture for real processes, none of which outlives its test."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster_of_processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()
