"""The headless browser of the report's tests."""

from tests.report.conftest import browser

__all__ = ["browser"]
