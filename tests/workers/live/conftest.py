"""The headless browser of the report's tests."""

from tests.workers.report.test_browser import browser

__all__ = ["browser"]
