"""The pytest plugin, which pytest finds by its entry point: see distlab/testing/plugin.py."""

from distlab.testing.plugin import (
    _distlab_case,
    group,
    mesh,
    pytest_addoption,
    pytest_configure,
    pytest_generate_tests,
    pytest_pyfunc_call,
    pytest_sessionfinish,
    rank,
    ranks,
    world_size,
)

__all__ = [
    "_distlab_case", "group", "mesh", "pytest_addoption", "pytest_configure", "pytest_generate_tests",
    "pytest_pyfunc_call", "pytest_sessionfinish", "rank", "ranks", "world_size",
]  # fmt: skip
