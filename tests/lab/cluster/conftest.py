"""A fixture for real processes, which ends them after the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.cluster.cluster_of_processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path / "runs")
    yield started
    started.close()
