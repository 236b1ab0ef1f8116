"""README and CHANGELOG: short enough to be read; the picture of a run with the command that made it."""

from xml.etree import ElementTree

from tests.docs.pages import README, TOP, fenced, page

MOST_LINES = 120
MOST_CHANGELOG_BYTES = 12_000


def test_it_is_read_in_five_minutes() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_the_changelog_is_what_a_user_notices() -> None:
    assert (TOP / "CHANGELOG.md").stat().st_size <= MOST_CHANGELOG_BYTES


def test_the_picture_is_of_the_command_beside_it() -> None:
    assert "](docs/picture.svg)" in README.read_text()
    texts = [
        text.text or ""
        for text in ElementTree.parse(TOP / "docs" / "picture.svg").iter("{http://www.w3.org/2000/svg}text")
    ]
    (settings,) = (text for text in texts if text.startswith("RUN_MODE="))
    chosen = set(settings.replace(".0 ", " ").split()) - {"WORLD_SIZE=4", "LAB_SEED=1"}  # the defaults
    assert chosen in [set(line.removesuffix(" make run").split()) for line in fenced(README.read_text(), "sh")]


def test_five_things_to_try_are_among_those_of_the_modes() -> None:
    tried = README.read_text().partition("## Five things to try")[2].partition("\n## ")[0]
    commands = [line.partition("#")[0].split() for line in fenced(tried, "sh")]
    assert len(commands) == 5
    more = [line.partition("#")[0].split() for line in fenced(page("modes"), "sh")]
    assert all(command in more for command in commands)
