"""The pages as a reader sees them: opened in headless Chromium, on a desk and on a phone, by day and by night.

Screenshots stay in tests/outputs/. Without Chromium these tests are skipped, except in a CI, where they fail.
"""

import base64
import json
import re
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from distlab.cli.report import main
from distlab.lab.report.html import TEMPLATES, source
from distlab.lab.report.records import Ideal
from tests.lab.report.made_up import drilled_run, good_run, pipeline_run, plus, with_check, with_measured, written

OUTPUTS = Path(__file__).parents[2] / "outputs"
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
  const kind = element.closest('svg.panel') && element.classList[0];  // the bar that a number stands in
  const bar = kind && [...element.parentElement.querySelectorAll('rect.' + kind)].find(r => {
    const a = r.getBoundingClientRect(), b = element.getBoundingClientRect(), x = (b.left + b.right) / 2;
    return a.left <= x && x <= a.right; });
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
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run in which all checks passed, one in which all failed, a pipeline with its timelines, and one with a drill."""
    folder = tmp_path_factory.mktemp("runs")
    five = {"naive": 81e-3, "flat": 55e-3, "bucketed": 50e-3, "ring": 49e-3, "ddp": 50e-3}
    passed = written(folder / "passed", good_run())
    failed = written(
        folder / "failed",
        with_measured(with_check(good_run(8, 40, five), "gradients", 3e-2), "flat", "wire bytes", 12e6, 2),
    )
    paper = [[["forward", str(k), 0.01 * k, 0.01 * k + 0.01] for k in range(8)]] * 4
    pipeline = written(folder / "pipeline", plus(pipeline_run(), Ideal("1f1b", paper)))
    assert (main([str(passed)]), main([str(failed)])) == (0, 1)
    drills = written(folder / "drills", drilled_run())
    assert (main([str(pipeline)]), main([str(drills)])) == (0, 0)
    reports = {"pass": passed, "fail": failed, "pipeline": pipeline, "drills": drills}
    return {name: run / "report.html" for name, run in reports.items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["pass", "fail", "pipeline", "drills"])
def test_a_page_can_be_read(
    browser: webdriver.Chrome, pages: dict[str, Path], name: str, width: str, scheme: str
) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    resize(browser, WIDTHS[width], 900)
    browser.get(pages[name].as_uri())
    charts = browser.execute_script("return document.querySelectorAll('.chart').length")
    assert charts >= 4
    WebDriverWait(browser, 20).until(lambda _: number_drawn(browser) == charts)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= WIDTHS[width]
    assert browser.execute_script(FAINT) == []
    assert complaints(browser) == []
    keep(browser, f"report-{name}-{width}-{scheme}.png", WIDTHS[width])


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 800)])
def test_the_first_screen_holds_the_verdict_and_the_picture(
    browser: webdriver.Chrome, pages: dict[str, Path], width: int, height: int
) -> None:
    resize(browser, width, height)
    browser.get(pages["pipeline"].as_uri())
    verdict, panel = (browser.find_element(By.CSS_SELECTOR, each) for each in (".verdict", "svg.panel"))
    last = browser.find_elements(By.CSS_SELECTOR, "svg.panel")[-1]
    assert all(part.rect["y"] + part.rect["height"] < height for part in (verdict, panel, last))
    # What is seen there is drawn: light and dark bars of several colours, of which no other part of the page has any.
    image = browser.get_screenshot_as_base64()
    colours = browser.execute_async_script(COLOURS, image, panel.rect)
    for name in ("blue", "orange", "lime", "crimson"):
        light, strong = (
            re.search(rf"^\.{kind}\.{name}.* fill: (#\w+)", source("marks.css"), re.MULTILINE)
            for kind in ("forward", "backward")
        )
        assert light and strong and {light[1], strong[1]} <= set(colours), name
    assert complaints(browser) == []


# The colours of the pixels in a part of a screenshot.
COLOURS = """
const [image, part, done] = arguments, picture = new Image();
picture.onload = () => {
  const canvas = Object.assign(document.createElement('canvas'), {width: picture.width, height: picture.height});
  const ink = canvas.getContext('2d'); ink.drawImage(picture, 0, 0);
  const data = ink.getImageData(part.x, part.y, part.width, part.height).data, found = new Set();
  for (let i = 0; i < data.length; i += 4)
    found.add('#' + [0, 1, 2].map(k => data[i + k].toString(16).padStart(2, '0')).join(''));
  done([...found]);
};
picture.src = 'data:image/png;base64,' + image;
"""


def test_the_mark_under_the_pointer_is_described(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    resize(browser, 1200, 900)
    browser.get(pages["pipeline"].as_uri())
    panel = browser.find_element(By.CSS_SELECTOR, "svg.panel[data-v='1f1b']")
    row = panel.find_elements(By.CSS_SELECTOR, "g[data-r='1'] rect.forward")
    assert len(row) == 8
    assert tooltip_of(browser, row[2]) == "rank 1: forward of microbatch 2, 10.0 ms"
    arrow = panel.find_element(By.CSS_SELECTOR, ".message[data-r='2,3']")
    assert browser.execute_script(POINTED, arrow).startswith("rank 2 to rank 3: 400 kB in ")
    assert [number.text for number in panel.find_elements(By.CSS_SELECTOR, "g[data-r='0'] text.forward")] == list(
        "01234567"
    )


POINTED = """
arguments[0].dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 300, clientY: 300}));
return document.querySelector('.tip').textContent;
"""


def tooltip_of(browser: webdriver.Chrome, mark: WebElement) -> str:
    """The text that is shown while the pointer is on the mark."""
    ActionChains(browser).move_to_element(mark).perform()
    tip = browser.find_element(By.CSS_SELECTOR, ".tip")
    WebDriverWait(browser, 10).until(lambda _: tip.is_displayed())
    return tip.text


def test_the_picture_plays_by_keys_and_shows_messages_on_their_way(
    browser: webdriver.Chrome, pages: dict[str, Path]
) -> None:
    resize(browser, 390, 800)
    browser.get(pages["pipeline"].as_uri())
    stage = browser.find_element(By.CSS_SELECTOR, ".stage")
    stage.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    status = browser.find_element(By.CSS_SELECTOR, ".status")
    assert "gpipe: rank 0: forward of microbatch" in status.text and "1f1b: " in status.text
    stage.send_keys(" ")
    slider = browser.find_element(By.CSS_SELECTOR, ".moment")
    before = float(str(slider.get_property("value")))
    frames = browser.execute_async_script(FRAMES)
    after = float(str(slider.get_property("value")))
    shown_ms = (
        (after - before) / 100 * float(browser.execute_script("return document.querySelector('.picture').dataset.ms"))
    )
    assert frames["moved"] >= 0.3 * frames["number"] > 0  # however many frames this machine draws in a second
    assert shown_ms == pytest.approx(1000 * frames["s"] / 100, rel=0.5)  # at a hundredth of its speed
    flown = browser.execute_script(FLOWN)
    assert flown["most"] > 0 and flown["after"] == 0
    stage.send_keys(Keys.END)
    assert status.text == ""
    assert complaints(browser) == []


# Two seconds of frames, and in how many of them the picture had moved; then the messages in flight over the whole step, and at its end.
FRAMES = """
const done = arguments[0], start = performance.now(), slider = document.querySelector('.moment');
let number = 0, moved = 0, last = slider.value;
const frame = now => {
  number++; moved += slider.value !== last; last = slider.value;
  now - start < 2000 ? requestAnimationFrame(frame) : done({number, moved, s: (now - start) / 1000}); };
requestAnimationFrame(frame);
"""
FLOWN = """
const slider = document.querySelector('.moment'); let most = 0;
const flying = () => [...document.querySelectorAll('.panel circle.dot')].filter(d => d.style.display !== 'none').length;
for (let at = 0; at <= 100; at += 0.5) {
  slider.value = at; slider.dispatchEvent(new Event('input')); if (at < 100) most = Math.max(most, flying()); }
return {most, after: flying()};
"""


def test_the_picture_zooms_and_comes_back(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    resize(browser, 1200, 900)
    browser.get(pages["pipeline"].as_uri())
    track, stage = (browser.find_element(By.CSS_SELECTOR, each) for each in (".track", ".stage"))
    whole = track.rect["width"]
    stage.send_keys("++")
    assert track.rect["width"] == pytest.approx(4 * whole, rel=0.01)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1200
    stage.send_keys("--")
    assert track.rect["width"] == pytest.approx(whole, rel=0.01)


def test_the_schedule_on_paper_is_switched_on_and_off(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    resize(browser, 1200, 900)
    browser.get(pages["pipeline"].as_uri())
    paper = browser.find_element(By.CSS_SELECTOR, "svg.ideal")
    assert not paper.is_displayed()
    browser.find_element(By.CSS_SELECTOR, "input.paper").click()
    assert paper.is_displayed() and not browser.find_element(By.CSS_SELECTOR, "svg.measured").is_displayed()
    browser.find_element(By.CSS_SELECTOR, "input.paper").click()
    assert not paper.is_displayed()


@pytest.mark.parametrize("name", ["pass", "pipeline"])
def test_a_page_prints_on_two_sheets_with_its_picture(
    browser: webdriver.Chrome, pages: dict[str, Path], name: str
) -> None:
    browser.get(pages[name].as_uri())
    sheets = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", sheets)) <= 2
    browser.execute_script("document.querySelector('.evidence').className = ''")  # the control: all of it takes more
    sheets = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", sheets)) > 2


# How many rules a browser takes of a style sheet, the declarations that mean nothing to it, and what is wrong with a
# script.
RULES = """
const sheet = new CSSStyleSheet(); sheet.replaceSync(arguments[0]);
const count = rules => [...rules].reduce((sum, rule) => sum + 1 + count(rule.cssRules || []), 0);
return count(sheet.cssRules);
"""
STRANGE = "return arguments[0].filter(([property, value]) => !CSS.supports(property, value));"
READ = "try { new Function(arguments[0]); return ''; } catch (error) { return String(error); }"
FILES = sorted(path.name for path in Path(str(TEMPLATES)).iterdir())


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".css")])
def test_a_style_sheet_is_read_whole(browser: webdriver.Chrome, name: str) -> None:
    text = re.sub(r"/\*.*?\*/", "", source(name), flags=re.DOTALL)
    assert browser.execute_script(RULES, text) == text.count("{") == text.count("}")
    bodies = re.findall(r"\{([^{}]*)\}", re.sub(r"@page.*|!important", "", text))
    pairs = [
        [part.strip() for part in each.split(":", 1)] for body in bodies for each in body.split(";") if each.strip()
    ]
    assert len(pairs) >= text.count("{") // 2
    wrong = ["colr", "red"]  # the control
    assert browser.execute_script(STRANGE, [*pairs, wrong]) == [wrong]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_a_script_can_be_read(browser: webdriver.Chrome, name: str) -> None:
    assert browser.execute_script(READ, source(name)) == ""
    assert "SyntaxError" in browser.execute_script(READ, source(name) + "}")


def test_what_cannot_be_read_is_seen(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    """The controls of the test above: faint text, a page wider than the phone, an empty chart, an error of a script."""
    resize(browser, 390, 900)
    browser.get(pages["pass"].as_uri())
    charts = number_drawn(browser)
    browser.execute_script("document.querySelector('h1').style.color = 'rgba(128, 128, 128, .4)'")
    browser.execute_script("document.querySelector('h1').style.width = '500px'")
    browser.execute_script("document.querySelector('.chart svg').replaceChildren()")
    browser.execute_script("console.error('wrong')")
    assert len(browser.execute_script(FAINT)) == 1
    assert browser.execute_script("return document.documentElement.scrollWidth") > 390
    assert number_drawn(browser) == charts - 1
    assert len(complaints(browser)) == 1


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the console says that is more than a remark."""
    entries = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


def number_drawn(browser: webdriver.Chrome) -> int:
    """Charts whose SVG holds at least one mark: a line, a bar or a box."""
    marks = ".series path, .series rect, .series circle"
    program = f"return [...document.querySelectorAll('.chart')].filter(chart => chart.querySelector('{marks}')).length"
    return int(browser.execute_script(program))


def resize(browser: webdriver.Chrome, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def keep(browser: webdriver.Chrome, name: str, width: int) -> None:
    """The whole page as a picture among the outputs of the tests."""
    OUTPUTS.mkdir(exist_ok=True)
    resize(browser, width, browser.execute_script("return document.documentElement.scrollHeight"))
    browser.save_screenshot(str(OUTPUTS / name))


# What a browser without a network has not: the site of Perfetto, which answers PING with PONG.
STAND_INS = """
window.open = url => { const site = {closed: false, postMessage(message) {
    if (message !== 'PING') { window.handed = new TextDecoder().decode(message.perfetto.buffer); return; }
    const answer = new MessageEvent('message', {data: 'PONG', origin: url});
    Object.defineProperty(answer, 'source', {value: site});
    window.dispatchEvent(answer); }};
  return site; };
"""


def test_the_figure_is_handed_to_perfetto(browser: webdriver.Chrome, pages: dict[str, Path]) -> None:
    browser.get(pages["pipeline"].as_uri())
    browser.execute_script(STAND_INS)
    browser.find_element(By.CSS_SELECTOR, ".perfetto").click()
    WebDriverWait(browser, 20).until(lambda seen: seen.execute_script("return window.handed || ''"))
    events = json.loads(browser.execute_script("return window.handed"))["traceEvents"]
    assert {each["args"]["name"] for each in events if each["ph"] == "M"} == {"gpipe", "1f1b"}
    forward = [each for each in events if each["name"] == "forward 0" and (each["pid"], each["tid"]) == (0, 0)]
    assert len(forward) == 1 and abs(forward[0]["dur"] - 10_000) < 100  # microseconds
    assert complaints(browser) == []
