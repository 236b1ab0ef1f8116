"""One model of a table: made once from what a run wrote, written by logs as text and by the page as HTML.

The page's side is the macro `table` in templates/parts.html.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, Self

TERMINAL = 80  # columns of whoever reads
COMMANDS = ("see it", "together", "rerun")  # words before a command
WIDTH = TERMINAL - len("worker0-1  | ")  # of a log's line: behind what Compose puts before it, or "rank 0 | "
INDENT = 11  # of what stands under its word

Kind = Literal["text", "number", "value"]


class Column(NamedTuple):
    """A column; a "number" stands to the right, a "value" (a number with words or an exponent) on the page alone."""

    title: str  # in a log of as many lines as it has
    kind: Kind = "text"
    in_log: bool = True
    inline: str = ""  # what the log writes before each cell where it leaves the titles out


class Verdict(NamedTuple):
    """A cell that judges its row: one word, and what else is to be said of it."""

    word: str
    remark: str = ""

    def __str__(self) -> str:
        return self.word + self.remark


class Wrong(str):
    """A cell whose number failed."""

    __slots__ = ()
    wrong = True


class Table(NamedTuple):
    """Columns and rows; cells are text, numbers or verdicts."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    titled: bool = True  # whether the log has the columns' titles above the rows

    @classmethod
    def of(cls, titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Self:
        """Titles and cells as they are: a column of numbers, and of cells without a value, stands to the right."""
        columns = []
        for index, title in enumerate(titles):
            cells = [row[index] for row in rows if row[index] != ""]
            number = cells and all(isinstance(each, int | float) for each in cells)
            columns.append(Column(title, "number" if number else "text"))
        return cls(columns, [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in rows])

    def text(self, width: int = 0, apart: int = 2, least: Iterable[int] = ()) -> list[str]:
        """The lines of a log: so many blanks between two columns, of which the first ones are at `least` so wide.

        Where they would be longer than `width`, columns stand closer, and the first one is cut in its middle.
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
        if width and sum(widths) + apart * (len(widths) - 1) > width:
            apart = 1
            widths[0] = max(1, min(widths[0], width - sum(widths[1:]) - len(widths) + 1))
        return [
            (" " * apart)
            .join(
                cell.rjust(size) if column.kind == "number" else middle_cut(cell, size).ljust(size)
                for cell, size, (_, column) in zip(row, widths, shown, strict=True)
            )
            .rstrip()
            for row in rows
        ]

    def under(self, word: str, least: Iterable[int] = ()) -> list[str]:
        """The lines under their `word`; none where there is no row."""
        lines = self.text(apart=3, least=least) if self.rows else []
        return [log_line("" if place else word, text) for place, text in enumerate(lines)]


def aligned(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table of these titles and cells."""
    return Table.of(titles, rows).text()


def middle_cut(name: str, most: int) -> str:
    """A name in so many columns, without its middle where it is longer."""
    if len(name) <= most:
        return name
    kept = max(0, most - 2)
    return f"{name[: kept - kept // 2]}..{name[len(name) - kept // 2 :]}"[:most]


def shortened(text: str, width: int) -> str:
    """At most so many columns."""
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def printable(name: str) -> str:
    """The name of a file on one line of a terminal, whatever is in it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


def log_line(word: str, text: str) -> str:
    """A line of the log under its word."""
    return f"{word:<{INDENT - 1}} {text}".rstrip()


def filled(text: str, width: int, indent: int = INDENT) -> list[str]:
    """On as many lines as it takes, none longer than that but for a path or a name, which are not broken."""
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def wrapped(word: str, text: str, width: int = WIDTH) -> list[str]:
    """A sentence under its word."""
    return filled(f"{word:<{INDENT}}{text}", width)


def unbroken(text: str) -> str:
    """The text with spaces at which `filled` breaks no line, as between a rank's name and its number."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def with_units(text: str) -> str:
    """The text in which no line ends between a number and its unit, a rank and its number, or before an arrow."""
    return re.sub(r"(?<=\d) (?=(?:[kMGT]?B|ms|s)\b)|(?<=\brank) (?=\d)| (?=->)|(?<=->) ", "\N{NO-BREAK SPACE}", text)


def in_lines(told: Iterable[tuple[str, str]]) -> list[str]:
    """Sentences under their words, paths and commands whole."""
    return [
        line
        for word, text in told
        for line in ([log_line(word, text)] if word in ("report", "rerun", "") else wrapped(word, text))
    ]


def on_terminal(lines: Iterable[str]) -> list[str]:
    """Lines without a rank before them, those that are too long wrapped under their word; a command stays whole."""
    found: list[str] = []
    for line in lines:
        text = line.lstrip()
        whole = len(line) <= TERMINAL or line.startswith(COMMANDS)
        indent = INDENT if "  " in text[:INDENT] else len(line) - len(text)
        found += [line] if whole else filled(line, TERMINAL, indent)
    return found
