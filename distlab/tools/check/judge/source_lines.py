"""The source text of a rank's line, and the condition above it that only some ranks satisfy.

It is read from rank 0's disk after the run, by a file name that a script reported: anything but a Python file of usual
size has no text.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from distlab.tools.check.judge.rank_state import CallPlace

MOST_BYTES = 4_000_000
SHOWN = 160  # of a line
# In the condition of a branch, or the name of a decorator, that not all ranks satisfy.
OF_A_RANK = ("rank", "is_main", "is_master", "leader", "process_zero", "global_zero", "process_index", "main_process")


def source_line(place: CallPlace) -> str:
    """Return the text of the line without its indent; empty if unavailable."""
    lines, number = text_of(place).splitlines(), number_of(place)
    return lines[number - 1].strip()[:SHOWN] if 0 < number <= len(lines) else ""


def branch_of(place: CallPlace) -> str:
    """Return the condition on a rank that decides whether the line is reached, with its place, to follow "it ": of the
    line itself, else of the nearest caller."""
    return next((found for each in (place, *callers_of(place)) if (found := branch_at(each))), "")


def branch_at(place: CallPlace) -> str:
    """Return the innermost such condition: around the line, before it in its block, or of a decorator."""
    number, found, file = number_of(place), "", place.line.rpartition(":")[0]
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(text_of(place))):  # from the outside in
            if not is_around(node, number):
                continue
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                words = [ast.unparse(each) for each in node.decorator_list]
                found = next((f"is under `@{each}` ({file}:{node.lineno})" for each in words if names_rank(each)), "")
            if isinstance(node, ast.If) and names_rank(condition := ast.unparse(node.test)):
                side = "under" if number <= (node.body[-1].end_lineno or 0) else "in the other branch of"
                found = f"is {side} `if {condition[:SHOWN]}` ({file}:{node.lineno})"
            for branch in returns_before(node, number):
                text = f"{ast.unparse(branch.test)[:SHOWN]}: {ast.unparse(branch.body[-1])[:SHOWN]}"
                found = f"comes after `if {text}` ({file}:{branch.lineno})"
    return found


def is_around(node: ast.AST, number: int) -> bool:
    """Return whether the line is inside the node, but not its first; for a branch, in its body."""
    if isinstance(node, ast.Module):
        return True
    first = node.body[0].lineno if isinstance(node, ast.If) else getattr(node, "lineno", number) + 1
    return first <= number <= (getattr(node, "end_lineno", 0) or 0)


def returns_before(node: ast.AST, number: int) -> Iterator[ast.If]:
    """Yield branches in which some ranks return from a block of this node before the line."""
    for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        if isinstance(block, list) and block and block[0].lineno <= number <= (block[-1].end_lineno or 0):
            for each in block:
                leaves = isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return) and not each.orelse
                if leaves and (each.end_lineno or 0) < number and names_rank(ast.unparse(each.test)):
                    yield each


def names_rank(words: str) -> bool:
    return any(each in words.lower() for each in OF_A_RANK)


def callers_of(place: CallPlace) -> list[CallPlace]:
    """Return the user's lines above, the nearest first: from files in the line's folder."""
    named = place.line.rpartition(":")[0]
    folder = place.file.removesuffix(named) if named and place.file.endswith(named) else ""
    lines = place.callers.split(" from ") if folder and place.callers else []
    return [CallPlace(line, "", f"{folder}{line.rpartition(':')[0]}") for line in lines]


def loop_at(place: CallPlace) -> tuple[str, int, int] | None:
    """Return file, first and last line of the loop whose head is this line."""
    number = number_of(place)
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(text_of(place))):
            if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and node.lineno == number:
                return place.file, number, node.end_lineno or number
    return None


def is_within(place: CallPlace, lines: tuple[str, int, int]) -> bool:
    """Return whether the line, or one of its callers, is among these lines of a file."""
    file, first, last = lines
    return any(each.file == file and first <= number_of(each) <= last for each in (place, *callers_of(place)))


def number_of(place: CallPlace) -> int:
    """Return the number of the line; 0 without one."""
    number = place.line.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdecimal() and len(number) < len(str(MOST_BYTES)) else 0


def text_of(place: CallPlace) -> str:
    """Return the file's text; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        path = Path(place.file)
        if path.suffix == ".py" and path.is_file() and path.stat().st_size <= MOST_BYTES:
            return path.read_text(errors="replace")
    return ""
