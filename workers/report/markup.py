"""HTML by hand, escaped at the one place where text becomes markup: a page, a section, a table, a chip."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from workers.report.style import STYLE

# Nothing may be fetched: the page shows the same offline, mailed or kept as an artifact of a CI.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


class Markup(str):
    """Text that is HTML already; everything else is escaped by `text`."""

    __slots__ = ()


def text(value: Any) -> str:
    """`value` as HTML: escaped, unless it is Markup."""
    return value if isinstance(value, Markup) else html.escape(str(value))


def document(title: str, body: Iterable[str]) -> str:
    """A whole page that needs nothing but itself."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>\n</body>\n</html>\n",
        ]
    )


def section(title: str, *parts: str, note: str = "") -> Markup:
    """A card under a heading, or nothing if it would be empty."""
    if not any(parts):
        return Markup()
    told = f'<p class="note">{text(note)}</p>' if note else ""
    return Markup(f"<section>\n<h2>{text(title)}</h2>{told}\n" + "\n".join(parts) + "\n</section>")


def table(columns: Sequence[Any], rows: Sequence[Sequence[Any]], numbers: Iterable[int] = ()) -> Markup:
    """A table that scrolls on its own where the screen is narrow; columns in `numbers` go to the right."""
    if not rows:
        return Markup()
    right = set(numbers)

    def cell(tag: str, index: int, value: Any) -> str:
        long = not isinstance(value, Markup) and len(str(value)) > 24  # or a phone breaks it after every word
        kind = " class=n" if index in right else " class=w" if long else ""
        return f"<{tag}{kind}>{text(value)}</{tag}>"

    def row(tag: str, cells: Sequence[Any]) -> str:
        return "<tr>" + "".join(cell(tag, index, value) for index, value in enumerate(cells)) + "</tr>"

    body = "\n".join(row("td", cells) for cells in rows)
    return Markup(
        f'<div class="scroll" tabindex="0"><table><thead>{row("th", columns)}</thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def folded(summary: str, *parts: str) -> Markup:
    """What opens with a click, or a search of the browser; nothing where it would be empty."""
    if not any(parts):
        return Markup()
    return Markup(f"<details><summary>{text(summary)}</summary>\n" + "\n".join(parts) + "\n</details>")


def chip(word: str) -> Markup:
    """A word of judgement in its colour."""
    kind = {"held": "good", "PASS": "good", "shown": "soft", "FAILED": "bad", "FAIL": "bad"}.get(word, "warn")
    return Markup(f'<span class="chip {kind}">{text(word)}</span>')


def code(value: Any) -> Markup:
    """Text as it would be typed."""
    return Markup(f"<code>{text(value)}</code>")


def grid(parts: Iterable[str], least_rem: float = 19) -> Markup:
    """Figures of at least that width beside each other where there is room, below each other on a phone."""
    inner = "".join(f"<figure>{part}</figure>" for part in parts)
    return Markup(f'<div class="grid" style="--column:{least_rem:.1f}rem">{inner}</div>')
