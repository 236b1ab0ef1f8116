"""The page as a reader sees it: a real run of three ranks in headless Chromium, one of which is killed meanwhile.

Screenshots stay in tests/outputs/. Without Chromium these tests are skipped, except in a CI, where they fail.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from distlab.cluster.launch import free_port
from distlab.report.progress import places
from tests.cluster.cluster_of_processes import Rank
from tests.live.states import run_of, state
from tests.live.test_server import serving
from tests.report.test_browser import FAINT, WIDTHS, complaints, keep, resize

pytestmark = pytest.mark.timeout(180)

RED_S = 3.0  # from the death of a rank until its row is red
LONG = {
    "RUN_MODE": "dp", "WORLD_SIZE": "3", "LAB_MODEL": "mlp", "LAB_WIDTH": "32", "LAB_DEPTH": "2", "LAB_STEPS": "100000",
    "LAB_VARIANT": "flat,ring", "LAB_PROOF": "0",
}  # fmt: skip


@contextmanager
def running(folder: Path, **variables: str) -> Iterator[tuple[Rank, int]]:
    """A long run of three local ranks in `folder`, and the port of its page."""
    port = free_port()
    own = {"LAB_LIVE_PORT": str(port), "LAB_RUNS_DIR": str(folder)}
    run = Rank([sys.executable, "-m", "workers"], LONG | own | variables)
    try:
        yield run, port
    finally:
        run.process.send_signal(signal.SIGTERM)
        run.end(30)


def opened(browser: webdriver.Chrome, port: int) -> None:
    """Open the page, once the server is there."""

    def there(_: object) -> bool:
        try:
            browser.get(f"http://127.0.0.1:{port}/")
        except Exception:  # Chromium shows a page of its own where nobody listens
            return False
        return browser.title == "distlab live"

    resize(browser, WIDTHS["desk"], 900)
    WebDriverWait(browser, 30, poll_frequency=0.2).until(there)
    browser.get_log("browser")  # type: ignore[no-untyped-call]  # what was said before it was there


def shown(browser: webdriver.Chrome) -> list[dict[str, str]]:
    """The cells of each rank's row by their class, and the row's own."""
    script = """return [...document.querySelectorAll('#ranks tbody tr')].map(row => Object.fromEntries([
      ['row', row.className], ...[...row.cells].map(cell => [cell.className, cell.textContent])]))"""
    found: list[dict[str, str]] = browser.execute_script(script)
    return found


def until(browser: webdriver.Chrome, holds: Callable[[], Any], bound_s: float = 60) -> Any:
    return WebDriverWait(browser, bound_s, poll_frequency=0.05).until(lambda _: holds())


def steps(browser: webdriver.Chrome) -> int:
    """How far the slowest rank of all three is in the timed pass; 0 before."""
    timed = [row["step"].partition(" of ") for row in shown(browser)]
    return min((int(step) for step, of, _ in timed if of), default=0) if len(timed) == 3 else 0


def totals(browser: webdriver.Chrome) -> list[str]:
    return [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "#bytes td")]


def test_a_run_is_seen_and_a_killed_rank_is_red_within_three_seconds(browser: webdriver.Chrome, tmp_path: Path) -> None:
    with running(tmp_path / "runs", LAB_LIVE="1") as (run, port):
        opened(browser, port)
        first = until(browser, lambda: steps(browser))
        sent = totals(browser)
        until(browser, lambda: steps(browser) > first + 5)
        assert totals(browser) != sent
        assert [row["row"] for row in shown(browser)] == ["running"] * 3
        until(browser, lambda: all(re.search(r"→\d [\d.]+ [kM]B/s", row["sends"]) for row in shown(browser)))
        until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "#chart polyline")) == 2)
        assert [entry.text.split()[0] for entry in browser.find_elements(By.CSS_SELECTOR, "#key > span")] == [
            "flat",
            "ring",
        ]
        assert browser.find_element(By.ID, "word").text == "running"
        keep(browser, "live-running.png", WIDTHS["desk"])
        resize(browser, WIDTHS["desk"], 900)

        pid = int(shown(browser)[1]["host"].rpartition(" ")[2])
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        until(browser, lambda: shown(browser)[1]["row"] == "lost", RED_S)
        assert time.monotonic() - killed_at < RED_S
        row = browser.find_elements(By.CSS_SELECTOR, "#ranks tbody tr")[1]
        assert row.find_element(By.CSS_SELECTOR, ".how").text == "lost"
        red = "return getComputedStyle(arguments[0]).backgroundColor"
        until(
            browser,
            lambda: browser.execute_script(red, row.find_element(By.CSS_SELECTOR, ".rank")) == "rgb(253, 229, 227)",
        )

        until(browser, lambda: "rank 1 lost at step" in browser.find_element(By.ID, "sentence").text, 20)
        assert browser.find_element(By.ID, "word").text == "LOST"
        until(browser, lambda: "ended with its server" in browser.find_element(By.ID, "foot").text, 20)
        assert [each["row"] for each in shown(browser)] == ["ended", "lost", "ended"]
        assert run.end(30) == 3
        keep(browser, "live-lost.png", WIDTHS["desk"])
    assert complaints(browser) == []


def test_without_lab_live_nothing_is_written_and_nothing_served(tmp_path: Path) -> None:
    with running(tmp_path / "runs", LAB_STEPS="30") as (run, _):
        assert run.end(90) == 0
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert places(folder) == {}
    assert "http://" not in run.text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_can_be_read(browser: webdriver.Chrome, tmp_path: Path, width: str, scheme: str) -> None:
    curve = [[step, 5.0 / (1 + step)] for step in range(20)]
    losses = dict.fromkeys(("naive", "flat", "bucketed", "ring", "ddp"), curve)
    ends = [(f"10.0.0.{rank}", 500) for rank in range(3)]
    sent = [[[[*near], [*far], 7_000_000] for far in ends if far != near] for near in ends]
    states = [state(rank, losses=losses, sent=sent[rank], phase="all_reduce") for rank in range(3)]
    states[2] = state(2, waits_for=[0, 1], losses=losses, unmeasured="wire bytes are not measured: no counters")
    folder = run_of(tmp_path / "dp-20261123-085600", *states)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    with serving(str(folder)) as (_, port):
        opened(browser, port)
        resize(browser, WIDTHS[width], 900)
        until(browser, lambda: [row["row"] for row in shown(browser)] == ["running", "running", "waiting"])
        assert shown(browser)[2]["waits"] == "rank 0, rank 1"
        assert totals(browser) == ["-", "7.00 MB", "-", "7.00 MB", *"-----"]
        assert browser.find_element(By.ID, "faults").text == "wire bytes are not measured: no counters"
        until(browser, lambda: all(row["row"] == "lost" for row in shown(browser)), 5)  # nobody writes any more
        until(browser, lambda: browser.execute_script(FAINT) == [], 5)  # once the colours have changed
        assert browser.execute_script("return document.documentElement.scrollWidth") <= WIDTHS[width]
        assert complaints(browser) == []
        keep(browser, f"live-{width}-{scheme}.png", WIDTHS[width])
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
