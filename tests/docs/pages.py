"""The pages that a reader meets: README, CONTRIBUTING and docs/, and what a page is made of."""

import re
from pathlib import Path

TOP = Path(__file__).parents[2]
README = TOP / "README.md"
DOCS = sorted((TOP / "docs").rglob("*.md"))
PAGES = [README, TOP / "CONTRIBUTING.md", *DOCS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def page(name: str) -> str:
    """The text of docs/<name>.md."""
    return (TOP / "docs" / f"{name}.md").read_text()


def page_id(path: Path) -> str:
    """Its path in the repository, by which a test of it is called."""
    return path.relative_to(TOP).as_posix()


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def fenced(text: str, language: str) -> list[str]:
    """The lines of all fenced blocks of a language."""
    return [line for kind, block in FENCE.findall(text) if kind == language for line in block.splitlines()]


def anchors(text: str) -> set[str]:
    """What a link may point to in a page, as GitHub makes it of headings: `## A link` is #a-link."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
