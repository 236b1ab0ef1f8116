"""The exception that ended a script, as it is told: its words, the frames that are the user's own, its line.

Of a failure in torch or a framework ten frames say what one does: of each run of library frames their number is left,
and the innermost frame of all, where it was raised.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MOST_FRAMES = 40
MOST_TEXT = 20_000  # characters of an exception


def described(error: BaseException, kind: Callable[[str], str]) -> list[Any]:
    """Its type, its words, its traceback, and the innermost line of the script's folder; `kind` is whose a file is."""
    told = traceback.TracebackException.from_exception(error)
    text = "".join(shortened(told, kind))
    return [type(error).__name__, str(error)[:MOST_TEXT], text, place_of(error)]


def shortened(told: traceback.TracebackException, kind: Callable[[str], str]) -> Iterable[str]:
    """The lines of a traceback, and of those behind it, without the frames that are no user's."""
    before = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    if before is not None:
        yield from shortened(before, kind)
        how = "was the direct cause of" if told.__cause__ is not None else "was raised before"
        yield f"\nThis {how} the following exception:\n\n"
    yield "Traceback (most recent call last):\n"
    frames = list(told.stack)[-MOST_FRAMES:]
    left_out = 0
    begun = False  # what called the script is no part of it
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
    yield from told.format_exception_only()


def place_of(error: BaseException) -> str:
    """The innermost line that is no library's."""
    folder = str(Path(sys.argv[0]).parent)
    mine = [
        each for each in traceback.extract_tb(error.__traceback__)
        if each.filename.startswith(folder) and "site-packages/" not in each.filename
    ]  # fmt: skip
    return f"{os.path.relpath(mine[-1].filename, folder)}:{mine[-1].lineno}" if mine else ""
