"""A table, built once from a run's records, and printed as text by logs and as HTML by the page.

The HTML is made by the macro `table` in templates/parts.html.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, Self

TERMINAL = 80  # columns of a terminal
COMMANDS = ("see it", "together", "rerun")  # words before a command
WIDTH = TERMINAL - len("worker0-1  | ")  # of a log line after Compose's prefix, or "rank 0 | "
INDENT = 11  # of continuation lines

Kind = Literal["text", "number", "value"]


class Column(NamedTuple):
    """A column; a "number" is right-aligned, a "value" (a number with words or an exponent) only on the page."""

    title: str  # may have several lines in a log
    kind: Kind = "text"
    in_log: bool = True
    inline: str = ""  # printed before each cell in a log without titles


class Verdict(NamedTuple):
    """A cell that judges its row: one word, and an explanation."""

    word: str
    remark: str = ""

    def __str__(self) -> str:
        return self.word + self.remark


class Wrong(str):
    """A cell whose number failed its check."""

    __slots__ = ()
    wrong = True


class Table(NamedTuple):
    """Columns and rows; cells are text, numbers or verdicts."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    titled: bool = True  # whether the log prints the columns' titles above the rows

    @classmethod
    def of(cls, titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Self:
        """Build a table from titles and cells: columns with only numbers and empty cells are right-aligned."""
        columns = []
        for index, title in enumerate(titles):
            cells = [row[index] for row in rows if row[index] != ""]
            number = cells and all(isinstance(each, int | float) for each in cells)
            columns.append(Column(title, "number" if number else "text"))
        return cls(columns, [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in rows])

    def text(self, width: int = 0, gap: int = 2, least: Iterable[int] = ()) -> list[str]:
        """Return a log's lines, with `apart` blanks between columns, of which the first ones have `least` widths.

        If they are longer than `width`, columns move closer, and the first one is shortened in its middle.
        """
        shown = [(index, column) for index, column in enumerate(self.columns) if column.in_log]
        rows = [[("" if self.titled else column.inline) + str(row[i]) for i, column in shown] for row in self.rows]
        if self.titled:
            titles = [column.title.split("\n") for _, column in shown]
            high = max(map(len, titles))
            heads = zip(*([""] * (high - len(title)) + title for title in titles), strict=True)
            rows = [*map(list, heads), *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths = [max(pair) for pair in zip_longest(widths, least, fillvalue=0)]
        if width and sum(widths) + gap * (len(widths) - 1) > width:
            gap = 1
            widths[0] = max(1, min(widths[0], width - sum(widths[1:]) - len(widths) + 1))
        return [
            (" " * gap)
            .join(
                cell.rjust(size) if column.kind == "number" else middle_cut(cell, size).ljust(size)
                for cell, size, (_, column) in zip(row, widths, shown, strict=True)
            )
            .rstrip()
            for row in rows
        ]

    def under(self, word: str, least: Iterable[int] = ()) -> list[str]:
        """Return the lines under their `word`; none if there is no row."""
        lines = self.text(gap=3, least=least) if self.rows else []
        return [log_line("" if place else word, text) for place, text in enumerate(lines)]


def aligned(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table with these titles and cells."""
    return Table.of(titles, rows).text()


def middle_cut(name: str, most: int) -> str:
    """Return a name in at most `most` columns, without its middle if it is longer."""
    if len(name) <= most:
        return name
    kept = max(0, most - 2)
    return f"{name[: kept - kept // 2]}..{name[len(name) - kept // 2 :]}"[:most]


def shortened(text: str, width: int) -> str:
    """Return a text in at most `width` columns."""
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def printable(name: str) -> str:
    """Return a file name that is safe to print on one line of a terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


def log_line(word: str, text: str) -> str:
    """Return a line of the log with its word."""
    return f"{word:<{INDENT - 1}} {text}".rstrip()


def filled(text: str, width: int, indent: int = INDENT) -> list[str]:
    """Wrap a text to this width; only paths and names may be longer, since they are not broken."""
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def wrapped(word: str, text: str, width: int = WIDTH) -> list[str]:
    """Wrap a sentence under its word."""
    return filled(f"{word:<{INDENT}}{text}", width)


def unbroken(text: str) -> str:
    """Return the text with spaces at which `filled` breaks no line, such as between "rank" and its number."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def with_units(text: str) -> str:
    """Protect a text from line breaks between a number and its unit, "rank" and its number, or before an arrow."""
    return re.sub(r"(?<=\d) (?=(?:[kMGT]?B|ms|s)\b)|(?<=\brank) (?=\d)| (?=->)|(?<=->) ", "\N{NO-BREAK SPACE}", text)


def in_lines(sentences: Iterable[tuple[str, str]]) -> list[str]:
    """Wrap sentences under their words, but keep paths and commands on one line."""
    return [
        line
        for word, text in sentences
        for line in ([log_line(word, text)] if word in ("report", "rerun", "") else wrapped(word, text))
    ]


def on_terminal(lines: Iterable[str]) -> list[str]:
    """Wrap lines without a rank prefix that are too long under their word; commands stay on one line."""
    found: list[str] = []
    for line in lines:
        text = line.lstrip()
        whole = len(line) <= TERMINAL or line.startswith(COMMANDS)
        indent = INDENT if "  " in text[:INDENT] else len(line) - len(text)
        found += [line] if whole else filled(line, TERMINAL, indent)
    return found
