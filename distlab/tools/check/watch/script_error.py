"""The exception that ended a script, as reported: its message, the user's frames and its line.

Ten frames of a library say no more than one: each run of library frames is replaced by their number, except the
innermost frame, which raised.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MOST_FRAMES = 40
MOST_TEXT = 20_000  # characters of an exception


def describe_error(error: BaseException, kind: Callable[[str], str]) -> list[Any]:
    """Return type, message, traceback, and innermost line of the script's folder; `kind` returns a file's owner."""
    exception = traceback.TracebackException.from_exception(error)
    text = "".join(shortened(exception, kind))
    return [type(error).__name__, str(error)[:MOST_TEXT], text, place_of(error)]


def shortened(exception: traceback.TracebackException, kind: Callable[[str], str]) -> Iterable[str]:
    """Yield the lines of a traceback and its causes, without library frames."""
    cause = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)
    if cause is not None:
        yield from shortened(cause, kind)
        how = "was the direct cause of" if exception.__cause__ is not None else "was raised before"
        yield f"\nThis {how} the following exception:\n\n"
    yield "Traceback (most recent call last):\n"
    frames = list(exception.stack)[-MOST_FRAMES:]
    left_out = 0
    begun = False  # the script's caller is not included
    for index, frame in enumerate(frames):
        mine = kind(frame.filename) == "user"
        if mine or index == len(frames) - 1:
            if left_out and begun:
                yield f"  ... {left_out} {'line' if left_out == 1 else 'lines'} of libraries ...\n"
            left_out = 0
            yield from traceback.format_list([frame])
            begun = True
        else:
            left_out += 1
    yield from exception.format_exception_only()


def place_of(error: BaseException) -> str:
    """Return the innermost line that is not a library's."""
    folder = str(Path(sys.argv[0]).parent)
    own_lines = [
        each for each in traceback.extract_tb(error.__traceback__)
        if each.filename.startswith(folder) and "site-packages/" not in each.filename
    ]  # fmt: skip
    return f"{os.path.relpath(own_lines[-1].filename, folder)}:{own_lines[-1].lineno}" if own_lines else ""
