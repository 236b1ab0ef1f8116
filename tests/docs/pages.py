"""The pages of the project: README, CONTRIBUTING and docs/, and functions that read parts of a page."""

import re
from pathlib import Path

TOP = Path(__file__).parents[2]
README = TOP / "README.md"
DOCS = sorted((TOP / "docs").rglob("*.md"))
PAGES = [README, TOP / "CONTRIBUTING.md", *DOCS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def page(name: str) -> str:
    """Return the text of docs/<name>.md."""
    return (TOP / "docs" / f"{name}.md").read_text()


def page_id(path: Path) -> str:
    """Return the path of a page in the repository, the id of its tests."""
    return path.relative_to(TOP).as_posix()


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", text)


def fenced(text: str, language: str) -> list[str]:
    """Return the lines of all fenced blocks of a language."""
    return [line for kind, block in FENCE.findall(text) if kind == language for line in block.splitlines()]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings: `## A link` becomes #a-link."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
