"""The links inside of a built site: each has to lead to a file, and to an anchor that is in it."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

ELSEWHERE = ("http:", "https:", "mailto:", "data:", "javascript:")
NEVER = ("https://", "http://", "//")  # what a page without a network must not load


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(given.get("href", ""))


@cache
def read(path: Path) -> Page:
    return Page(path.read_text())


def dead_links(site: Path) -> list[str]:
    """A sentence for each link or load that leads nowhere, or out of the site for what a page needs."""
    dead = []
    for path in sorted(site.rglob("*.html")):
        found, place = read(path), path.relative_to(site)
        dead += [f"{place} loads {each}, which needs a network" for each in found.loads if each.startswith(NEVER)]
        local = [each for each in found.loads if not each.startswith((*NEVER, *ELSEWHERE))]
        for link in [*found.links, *local]:
            if not link.startswith(ELSEWHERE) and not leads(path, link):
                dead.append(f"{place} links to {link}, which is not there")
    return dead


def leads(page: Path, link: str) -> bool:
    """Whether a link of this page leads to a file and an anchor that exist."""
    path, anchor = urldefrag(link)
    target = page.parent / unquote(path.partition("?")[0]) if path else page
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    return not anchor or target.suffix != ".html" or unquote(anchor) in read(target.resolve()).anchors
