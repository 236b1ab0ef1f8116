"""Tables as a person reads them in a terminal."""

from typing import Any


def aligned(columns: list[str], rows: list[list[Any]]) -> list[str]:
    """A table as lines: numbers to the right, words to the left, two spaces between columns."""
    cells = [[_cell(value) for value in row] for row in [columns, *rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    numeric = [bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(columns))]
    return [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]


def printable(name: str) -> str:
    """The name of a file on one line of a terminal, whatever is in it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
