"""One model of a table: made once from what a run wrote, written by the log as text and by the page as HTML.

The page's side is the macro `table` in templates/parts.html.
"""

import textwrap
from collections.abc import Container, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

# Tables as a person reads them in a terminal.


def aligned(columns: list[str], rows: list[list[Any]]) -> list[str]:
    """A table as lines: numbers to the right, words to the left, two spaces between columns."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in [columns, *rows]]
    return [text.rstrip() for text in in_columns(cells, numeric(len(columns), rows), 2)]


def numeric(num_columns: int, rows: Sequence[Sequence[Any]]) -> list[int]:
    """The columns that hold nothing but numbers, and cells without a value."""
    columns = [[row[index] for row in rows if row[index] != ""] for index in range(num_columns)]
    return [
        index for index, cells in enumerate(columns) if cells and all(isinstance(each, int | float) for each in cells)
    ]


def in_columns(
    rows: Sequence[Sequence[str]], numbers: Container[int], apart: int, least: Iterable[int] = ()
) -> list[str]:
    """Rows of cells as lines, so many blanks between two columns; those in `numbers` stand to the right, and the first
    ones are at `least` so wide."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = [max(pair) for pair in zip_longest(widths, least, fillvalue=0)]
    return [
        (" " * apart).join(
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def printable(name: str) -> str:
    """The name of a file on one line of a terminal, whatever is in it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


Kind = Literal["text", "number", "value"]


class Column(NamedTuple):
    """A column; a "number" stands to the right, a "value" (a number with words or an exponent) on the page alone."""

    title: str
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


def table_lines(word: str, table: Table, least: Sequence[int] = ()) -> list[str]:
    """The table as lines of the log, the first one under its `word`; the first columns are at `least` so wide."""
    if not table.rows:
        return []
    shown = [(index, column) for index, column in enumerate(table.columns) if column.in_log]
    rows = [
        [("" if table.titled else column.inline) + str(row[index]) for index, column in shown] for row in table.rows
    ]
    titles = [[column.title for _, column in shown]] if table.titled else []
    numbers = [place for place, (_, column) in enumerate(shown) if column.kind == "number"]
    lines = in_columns(titles + rows, numbers, 3, least)
    return [log_line("" if place else word, text) for place, text in enumerate(lines)]


TERMINAL = 80  # columns of whoever reads
COMMANDS = ("see it", "together", "rerun")  # words before a command
WIDTH = TERMINAL - len("worker0-1  | ")  # of a log's line: behind what Compose puts before it, or "rank 0 | "
INDENT = 11  # of what stands under its word


def wrapped(word: str, text: str, width: int = WIDTH) -> list[str]:
    """The same on as many lines as it takes, none longer than that but for a path or a name, which are not broken."""
    return textwrap.wrap(
        f"{word:<{INDENT}}{text}", width, subsequent_indent=" " * INDENT, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def on_terminal(lines: Iterable[str]) -> list[str]:
    """Lines without a rank before them, those that are too long wrapped under their word; a command stays whole."""
    found: list[str] = []
    for line in lines:
        text = line.lstrip()
        indent = INDENT if "  " in text[:INDENT] else len(line) - len(text)
        whole = len(line) <= TERMINAL or line.startswith(COMMANDS)
        found += (
            [line]
            if whole
            else textwrap.wrap(
                line, TERMINAL, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
            )
        )
    return found


def shortened(text: str, width: int) -> str:
    """At most so many columns."""
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def log_line(word: str, text: str) -> str:
    """A line of the log under its word."""
    return f"{word:<10} {text}".rstrip()
