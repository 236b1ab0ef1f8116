"""The script's own text at a line that a rank was in, and the condition above it that only some ranks meet.

It is read from rank 0's disk after the run, by a name that a script has told: what is no Python file of usual size has
no text.
"""

import ast
from contextlib import suppress
from pathlib import Path

from distlab.check.rank_state import CallPlace

MOST_BYTES = 4_000_000
SHOWN = 160  # characters of a line
SIZES = ("world", "size", "ranks", "num_p", "gpus", "replicas", "workers")  # in a divisor that is a number of ranks
OF_A_RANK = ("rank", "is_main", "is_master", "leader")  # in the condition of a branch that not all ranks take


def source_line(place: CallPlace) -> str:
    """The text of the line without its indent; empty where it is not to be had."""
    lines, number = text_of(place).splitlines(), number_of(place)
    return lines[number - 1].strip()[:SHOWN] if 0 < number <= len(lines) else ""


def branch_of(place: CallPlace) -> str:
    """The innermost condition around the line that names a rank, and where it stands, as the words of a sentence; of a
    helper's line that around the nearest of its callers in the same file."""
    file, text = place.line.rpartition(":")[0], text_of(place)
    lines = [each for each in (place.line, *place.callers.split(" from ")) if each.rpartition(":")[0] == file]
    return next((found for each in lines if (found := branch_around(place._replace(line=each), text))), "")


def branch_around(place: CallPlace, text: str) -> str:
    """The same of this line alone."""
    number, found = number_of(place), ""
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(text)):  # from the outside to the inside
            if isinstance(node, ast.If) and node.lineno < number <= (node.end_lineno or 0):
                condition = ast.unparse(node.test)
                if any(word in condition.lower() for word in OF_A_RANK):
                    side = "" if number <= (node.body[-1].end_lineno or 0) else "the other side of "
                    found = f"{side}`if {condition[:SHOWN]}` ({place.line.rpartition(':')[0]}:{node.lineno})"
    return found


def divided_before(place: CallPlace) -> bool:
    """Whether the function of the line divides something by a number of ranks before it: a gradient, or the loss."""
    number, found = number_of(place), False
    with suppress(SyntaxError, ValueError, RecursionError):
        tree = ast.parse(text_of(place))
        scopes = [each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        around = [each for each in scopes if each.lineno <= number <= (each.end_lineno or 0)]
        scope = max(around, key=lambda each: each.lineno) if around else tree
        for node in ast.walk(scope):
            if getattr(node, "lineno", number + 1) <= number:
                found = found or any(
                    word in ast.unparse(divisor).lower() for divisor in divisors(node) for word in SIZES
                )
    return found


def divisors(node: ast.AST) -> list[ast.expr]:
    """What is divided by in this node: an operator, or div, div_, true_divide."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div):
        return [node.right if isinstance(node, ast.BinOp) else node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "div" in node.func.attr:
        return node.args
    return []


def number_of(place: CallPlace) -> int:
    """The number of the line; 0 where there is none."""
    number = place.line.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdecimal() and len(number) < len(str(MOST_BYTES)) else 0


def text_of(place: CallPlace) -> str:
    """The file's text; empty where it cannot be read."""
    with suppress(OSError, ValueError):
        path = Path(place.file)
        if path.suffix == ".py" and path.is_file() and path.stat().st_size <= MOST_BYTES:
            return path.read_text(errors="replace")
    return ""
