"""The pages as a reader sees them: opened in headless Chromium, on a desk and on a phone, by day and by night.

Screenshots stay in tests/outputs/. Without Chromium these tests are skipped, except in a CI, where they fail.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.workers.report.made_up import good_run, pipeline_run, with_check, with_measured, written
from workers.report.__main__ import main

OUTPUTS = Path(__file__).parents[2] / "outputs"
SWITCHES = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
WIDTHS = {"desk": 1200, "phone": 390}

pytestmark = pytest.mark.timeout(120)

# Every text that can be seen, with the worst contrast to what lies behind it (WCAG 2.2, relative luminance).
FAINT = """
const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
const probe = canvas.getContext('2d', {willReadFrequently: true});
const rgba = colour => { probe.clearRect(0, 0, 1, 1); probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data].map((v, i) => i < 3 ? v : v / 255); };
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
const linear = v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
const luminance = c => { const [r, g, b] = c.map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = element => { const layers = [];
  for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
  const bar = element.closest('.point')?.querySelector('path');  // the bar that a number stands in
  if (bar) layers.unshift(rgba(getComputedStyle(bar).fill));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]); };
const faint = [];
for (const element of document.querySelectorAll('main *')) {
  const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || element.tagName === 'SCRIPT' || !element.getClientRects().length) continue;
  const style = getComputedStyle(element), back = ground(element);
  const ink = over(rgba(element instanceof SVGElement ? style.fill : style.color), back);
  const [light, dark] = [luminance(ink), luminance(back)].sort((a, b) => b - a);
  const contrast = (light + 0.05) / (dark + 0.05);
  if (contrast < 4.5) faint.push([element.textContent.trim().slice(0, 40), contrast]);
}
return faint;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        reason = "Chromium or its driver is not installed (Debian: chromium, chromium-driver)"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and a CI must open the report")
        print(f"skipped: {reason}")
        pytest.skip(reason)
    options = Options()
    options.binary_location = program
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    opened.set_page_load_timeout(30)
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run in which all held, one in which nothing did, the two together, and a pipeline with its timelines."""
    folder = tmp_path_factory.mktemp("runs")
    five = {"naive": 81e-3, "flat": 55e-3, "bucketed": 50e-3, "ring": 49e-3, "ddp": 50e-3}
    passed = written(folder / "passed", good_run())
    failed = written(
        folder / "failed",
        with_measured(with_check(good_run(8, 40, five), "gradients", 3e-2), "flat", "wire bytes", 12e6, 2),
    )
    pipeline = written(folder / "pipeline", pipeline_run())
    assert (main([str(passed)]), main([str(failed)]), main([str(passed), str(failed)])) == (0, 1, 0)
    assert main([str(pipeline)]) == 0
    reports = {"pass": passed, "fail": failed, "pipeline": pipeline}
    return {name: run / "report.html" for name, run in reports.items()} | {"compare": failed / "compare-passed.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["pass", "fail", "pipeline", "compare"])
def test_a_page_can_be_read(
    browser: webdriver.Chrome, pages: dict[str, Path], name: str, width: str, scheme: str
) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    resize(browser, WIDTHS[width], 900)
    browser.get(pages[name].as_uri())
    charts = browser.execute_script("return document.querySelectorAll('.plotly-graph-div').length")
    assert charts >= 4
    WebDriverWait(browser, 20).until(lambda _: number_drawn(browser) == charts)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= WIDTHS[width]
    assert browser.execute_script(FAINT) == []
    assert complaints(browser) == []
    keep(browser, f"report-{name}-{width}-{scheme}.png", WIDTHS[width])


def test_a_bar_of_the_timeline_tells_what_it_was(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    resize(browser, 1200, 900)
    browser.get(pages["pipeline"].as_uri())
    chart = browser.find_element(By.CSS_SELECTOR, "[aria-label='what each rank did in a step of 1f1b']")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    forward, backward = chart.find_elements(By.CSS_SELECTOR, ".trace.bars")[:2]
    bars = forward.find_elements(By.CSS_SELECTOR, ".point path")
    assert len(bars) == len(backward.find_elements(By.CSS_SELECTOR, ".point path")) == 4 * 8
    OUTPUTS.mkdir(exist_ok=True)
    numbers = [number.text for number in forward.find_elements(By.CSS_SELECTOR, ".bartext") if number.is_displayed()]
    assert numbers == [str(microbatch) for _ in range(4) for microbatch in range(8)]
    assert hovered(browser, chart, bars[8 + 2]) == "forward 2 · 10.000 ms"  # of rank 1
    browser.save_screenshot(str(OUTPUTS / "timeline-hovered.png"))


def test_the_timeline_zooms_and_comes_back(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    resize(browser, 1200, 900)
    browser.get(pages["pipeline"].as_uri())
    chart = browser.find_element(By.CSS_SELECTOR, "[aria-label='what each rank did in a step of gpipe']")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    whole = shown_ms(browser, chart)
    ground = chart.find_element(By.CSS_SELECTOR, ".nsewdrag")
    ActionChains(browser).move_to_element(ground).click_and_hold().move_by_offset(200, 0).release().perform()
    WebDriverWait(browser, 10).until(lambda _: shown_ms(browser, chart) < 0.3 * whole)
    ActionChains(browser).double_click(ground).perform()
    WebDriverWait(browser, 10).until(lambda _: shown_ms(browser, chart) == whole)


def test_what_cannot_be_read_is_seen(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    """The controls of the test above: faint text, a page wider than the phone, an empty chart, an error of a script."""
    resize(browser, 390, 900)
    browser.get(pages["pass"].as_uri())
    charts = number_drawn(browser)
    browser.execute_script("document.querySelector('h1').style.color = 'rgba(128, 128, 128, .4)'")
    browser.execute_script("document.querySelector('h1').style.width = '500px'")
    browser.execute_script("document.querySelector('.plotly-graph-div').replaceChildren()")
    browser.execute_script("console.error('wrong')")
    assert len(browser.execute_script(FAINT)) == 1
    assert browser.execute_script("return document.documentElement.scrollWidth") > 390
    assert number_drawn(browser) == charts - 1
    assert len(complaints(browser)) == 1


def hovered(browser: webdriver.Chrome, chart: WebElement, bar: WebElement) -> str:
    """What the label says while the pointer is on `bar`."""
    ActionChains(browser).move_to_element(bar).perform()
    label = WebDriverWait(browser, 10).until(lambda _: chart.find_element(By.CSS_SELECTOR, ".hoverlayer .hovertext"))
    return str(label.text)


def shown_ms(browser: webdriver.Chrome, chart: WebElement) -> float:
    """The length of the time axis that a chart shows."""
    range_of = (
        "const [from, to] = arguments[0].querySelector('.plotly-graph-div')._fullLayout.xaxis.range; return to - from"
    )
    return float(browser.execute_script(range_of, chart))


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the console says that is more than a remark."""
    entries = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


def number_drawn(browser: webdriver.Chrome) -> int:
    """Charts whose SVG holds at least one mark: a line, a bar or a box."""
    marks = ".trace path, .points path, .js-line"
    return int(
        browser.execute_script(
            "return [...document.querySelectorAll('.plotly-graph-div')]"
            f".filter(chart => chart.querySelector('svg.main-svg') && chart.querySelector('{marks}')).length"
        )
    )


def resize(browser: webdriver.Chrome, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def keep(browser: webdriver.Chrome, name: str, width: int) -> None:
    """The whole page as a picture among the outputs of the tests."""
    OUTPUTS.mkdir(exist_ok=True)
    resize(browser, width, browser.execute_script("return document.documentElement.scrollHeight"))
    browser.save_screenshot(str(OUTPUTS / name))
