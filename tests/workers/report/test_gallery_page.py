"""The gallery as a reader has it before them: opened in headless Chromium, filtered by mouse and by keyboard alone."""

from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.workers.report.made_up import bent, good_run, pipeline_run, with_check, without, written
from tests.workers.report.test_browser import FAINT, complaints, keep, resize
from workers.report.__main__ import main as report
from workers.report.gallery import main as gallery
from workers.report.records import End, Losses, Start

SIZES = {"desk": (1400, 900), "phone": (390, 800)}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two modes that passed, failed, broke off, and one whose verdict cannot be read."""
    runs = tmp_path_factory.mktemp("runs")
    for name, records in {
        "steps": pipeline_run(4),
        "losses": good_run(2),
        "wrong": with_check(good_run(3), "weights", 1.0),
    }.items():
        report([str(written(runs / name, records))])
    tensor = bent(
        without(Losses, good_run(2)),
        lambda r: r.__class__(**vars(r) | {"run_mode": "tp"}) if isinstance(r, Start) else r,
    )
    report([str(written(runs / "plain", tensor))])
    written(runs / "cut", without(End, good_run(2)))
    (written(runs / "garbled", good_run(2)) / "run.json").write_text("{")
    (runs / "notes").mkdir()
    assert gallery(["--runs", str(runs)]) == 0
    return runs / "index.html"


def opened(browser: webdriver.Chrome, page: Path, size: str = "desk") -> webdriver.Chrome:
    resize(browser, *SIZES[size])
    browser.get(page.as_uri())
    return browser


def shown(browser: webdriver.Chrome) -> list[str]:
    """The names on the cards that can be seen."""
    cards = browser.find_elements(By.CSS_SELECTOR, ".card")
    return sorted(card.find_element(By.TAG_NAME, "h2").text.split()[0] for card in cards if card.is_displayed())


ALL = ["cut", "garbled", "losses", "plain", "steps", "wrong"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_can_be_read(browser: webdriver.Chrome, page: Path, size: str, scheme: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    opened(browser, page, size)
    assert shown(browser) == ALL
    assert browser.execute_script("return document.documentElement.scrollWidth") <= SIZES[size][0]
    assert browser.execute_script(FAINT) == []
    assert complaints(browser) == []
    drawn = "return [...document.querySelectorAll('.picture svg')].filter(svg => svg.getBoundingClientRect().width > 200).length"
    assert browser.execute_script(drawn) == 5
    keep(browser, f"gallery-{size}-{scheme}.png", SIZES[size][0])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("gpipe", ["steps"]),
        ("GPIPE  1f1b", ["steps"]),
        ("world_size=3 fail", ["wrong"]),
        ("WORLD_SIZE=2 unfinished", ["cut"]),
        ("run.json cannot be read", ["garbled"]),
        ("nothing of that kind", []),
        (" ", ALL),
    ],
)
def test_cards_are_found_by_all_words(browser: webdriver.Chrome, page: Path, words: str, found: list[str]) -> None:
    opened(browser, page).find_element(By.ID, "words").send_keys(words)
    assert shown(browser) == found
    assert browser.find_element(By.ID, "count").text == f"{len(found)} of 6 runs shown"
    assert complaints(browser) == []


def test_boxes_of_one_kind_add_and_of_two_narrow(browser: webdriver.Chrome, page: Path) -> None:
    opened(browser, page)

    def tick(value: str) -> list[str]:
        browser.find_element(By.CSS_SELECTOR, f"[value={value}]").click()
        return shown(browser)

    assert tick("pass") == ["losses", "plain", "steps"]
    assert tick("fail") == ["losses", "plain", "steps", "wrong"]
    assert tick("tp") == ["plain"]
    assert tick("pass") == []
    assert (tick("tp"), tick("fail")) == (["wrong"], ALL)
    told = [label.text for label in browser.find_elements(By.CSS_SELECTOR, "fieldset label")]
    assert (told[0], told[4:]) == ("pass (3)", ["dp (5)", "tp (1)"])
    assert sorted(told[1:4]) == ["broken (1)", "fail (1)", "unfinished (1)"]


@pytest.mark.parametrize("size", SIZES)
def test_the_keyboard_alone_reaches_all(browser: webdriver.Chrome, page: Path, size: str) -> None:
    opened(browser, page, size)

    def press(*keys: str) -> str:
        """Press them one after the other; returns what has the focus then."""
        for key in keys:
            ActionChains(browser).send_keys(key).perform()
        return str(browser.execute_script("const e = document.activeElement; return e.id || e.value || e.textContent"))

    assert press(Keys.TAB) == "words"
    press(*"gpipe")
    assert shown(browser) == ["steps"]
    press(*[Keys.BACKSPACE] * 5)
    value = press(Keys.TAB)
    assert value == "pass"
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert browser.execute_script(outline) == "solid"
    press(Keys.SPACE)
    assert shown(browser) == ["losses", "plain", "steps"]
    boxes = len(browser.find_elements(By.CSS_SELECTOR, "[type=checkbox]"))
    name = press(*[Keys.TAB] * boxes)
    assert name in ("losses", "plain", "steps")  # cards that are not shown are passed over
    press(Keys.ENTER)
    assert browser.current_url.endswith(f"/{name}/report.html")


def test_what_is_wrong_with_a_page_is_seen(browser: webdriver.Chrome, page: Path) -> None:
    """The controls: without its script the page has no filter, all cards are there, and the policy lets nothing in."""
    dead = page.with_name("dead.html")
    dead.write_text(page.read_text().replace("<script>", "<script type='text/plain'>"))
    opened(browser, dead).find_element(By.ID, "words").send_keys("gpipe")
    assert shown(browser) == ALL
    browser.execute_script("const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i)")
    browser.execute_script("document.querySelector('.card').style.width = '2000px'")
    assert browser.execute_script("return document.documentElement.scrollWidth") > 1400
    assert any("Content Security Policy" in message for message in complaints(browser))
