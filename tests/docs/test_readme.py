"""README and CHANGELOG are short, and quotes and the picture match their sources."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.pages import DOCS, README, TOP, fenced, page, page_id

MOST_LINES = 120
MOST_CHANGELOG_BYTES = 12_000
QUOTED = re.compile(r"^<!-- lines of: (\S+) -->\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_the_changelog_is_short() -> None:
    assert (TOP / "CHANGELOG.md").stat().st_size <= MOST_CHANGELOG_BYTES


@pytest.mark.parametrize("block", QUOTED.findall(README.read_text()), ids=lambda block: block[0])
def test_the_lines_quoted_from_a_page_exist(block: tuple[str, str]) -> None:
    """The lines exist in this order; the command above them is shortened."""
    name, lines = block
    rest = page(name)
    for line in [line for line in lines.splitlines() if not line.startswith("$ ")]:
        _, found, rest = rest.partition(f"\n{line}\n")
        assert found, line
        rest = f"\n{rest}"


def test_the_readme_quotes_few_lines_of_three_pages() -> None:
    text = README.read_text()
    assert [name for name, _ in QUOTED.findall(text)] == ["prove", "check", "practice"]
    assert {len(lines.splitlines()) for _, lines in QUOTED.findall(text)} <= {4, 5}


@pytest.mark.parametrize("path", DOCS, ids=page_id)
def test_the_title_of_a_page_is_a_question(path: Path) -> None:
    assert re.match(r"# .*\?\n", path.read_text())


def test_the_picture_shows_the_command_next_to_it() -> None:
    assert "](../picture.svg)" in page("modes/pp")
    texts = [
        text.text or ""
        for text in ElementTree.parse(TOP / "docs" / "picture.svg").iter("{http://www.w3.org/2000/svg}text")
    ]
    (settings,) = (text for text in texts if text.startswith("RUN_MODE="))
    chosen = set(settings.replace(".0 ", " ").split()) - {"WORLD_SIZE=4", "LAB_SEED=1"}  # the defaults
    assert chosen in [set(line.removesuffix(" make run").split()) for line in fenced(page("modes/pp"), "sh")]
