"""Tables as a person reads them in a terminal."""

from collections.abc import Container, Iterable, Sequence
from itertools import zip_longest
from typing import Any


def aligned(columns: list[str], rows: list[list[Any]]) -> list[str]:
    """A table as lines: numbers to the right, words to the left, two spaces between columns."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in [columns, *rows]]
    return [text.rstrip() for text in in_columns(cells, numeric(len(columns), rows), 2)]


def numeric(num_columns: int, rows: Sequence[Sequence[Any]]) -> list[int]:
    """The columns that hold nothing but numbers."""
    return [index for index in range(num_columns) if rows and all(isinstance(row[index], int | float) for row in rows)]


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
