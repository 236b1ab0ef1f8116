"""Meters look at all objects of this process: those of modules, 350,000, are put aside as on a rank."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _modules_put_aside() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
