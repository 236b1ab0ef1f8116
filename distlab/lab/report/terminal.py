"""A line as a terminal shows it: pass and fail in colour, and one line of progress that is rewritten in place.

Into a pipe or a file a line goes as it is. NO_COLOR (no-color.org) turns the colours off, TERM=dumb the rewriting too.
"""

import os
import re
import shutil
from collections.abc import Mapping
from typing import TextIO

REWRITES = "DISTLAB_REWRITES"  # a launcher's word to its ranks: what they say is seen on a terminal
PROGRESS = ("starting ", "waiting ", "working ")  # how a line of progress begins, behind the rank that says it
CLEAR = "\r\x1b[K"  # to the beginning of the line, and nothing in it
GREEN, RED, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"
GOOD = re.compile(r"\bPASS\b|\bpassed$")
BAD = re.compile(r"\b(?:FAIL|FAILED|LOST|REFUSED)\b|^(?:refused|broken|error|lost)\b")
RANK = re.compile(r"rank \d+ \| ")


class Screen:
    """A stream, and whether a line of progress stands on it."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self.rewrites = is_terminal(stream) and environ.get("TERM") != "dumb"
        self._in_colour = self.rewrites and not environ.get("NO_COLOR")
        self.seen = self.rewrites or REWRITES in environ  # on a terminal, perhaps that of the launcher
        self._progress = False

    def shown(self, line: str) -> str:
        """All that is written for this line, with its end."""
        if not self.rewrites:
            return f"{line}\n"
        before = self.cleared()
        who = RANK.match(line)
        rank, text = (who[0], line[who.end() :]) if who else ("", line)
        self._progress = text.startswith(PROGRESS)
        if self._progress:
            return f"{before}{line[: shutil.get_terminal_size().columns - 1]}"
        return f"{before}{rank}{coloured(text) if self._in_colour else text}\n"

    def cleared(self) -> str:
        """What takes a line of progress away, if one stands there."""
        before, self._progress = CLEAR if self._progress else "", False
        return before


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # there is none, or it was closed
        return False


def coloured(text: str) -> str:
    """The text with its judging words in green or red."""
    text = GOOD.sub(lambda word: f"{GREEN}{word[0]}{PLAIN}", text, count=1)
    return BAD.sub(lambda word: f"{RED}{word[0]}{PLAIN}", text, count=1)
