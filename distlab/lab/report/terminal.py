"""Terminal output: pass and fail in colour, and a line of progress that is rewritten in place.

A pipe or a file gets plain lines. NO_COLOR (no-color.org) turns colours off, TERM=dumb also rewriting.
"""

import os
import re
import shutil
from collections.abc import Mapping
from typing import TextIO

REWRITES = "DISTLAB_REWRITES"  # set by a launcher whose ranks' output is on a terminal
PROGRESS = ("starting ", "waiting ", "working ")  # the first word of a line of progress, after the rank
CLEAR = "\r\x1b[K"  # clear the line
GREEN, RED, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"
GOOD = re.compile(r"\bPASS\b|\bpassed$")
BAD = re.compile(r"\b(?:FAIL|FAILED|LOST|REFUSED)\b|^(?:refused|broken|error|lost)\b")
RANK = re.compile(r"rank \d+ \| ")


class Screen:
    """A stream, and whether its last line is one of progress."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self.rewrites = is_terminal(stream) and environ.get("TERM") != "dumb"
        self._in_colour = self.rewrites and not environ.get("NO_COLOR")
        self.seen = self.rewrites or REWRITES in environ  # on a terminal, perhaps the launcher's
        self._progress = False

    def shown(self, line: str) -> str:
        """Return what to write for this line, with its end."""
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
        """Return the text that clears a line of progress, if there is one."""
        before, self._progress = CLEAR if self._progress else "", False
        return before


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # there is no stream, or it was closed
        return False


def coloured(text: str) -> str:
    """Return the text with pass and fail words in green or red."""
    text = GOOD.sub(lambda word: f"{GREEN}{word[0]}{PLAIN}", text, count=1)
    return BAD.sub(lambda word: f"{RED}{word[0]}{PLAIN}", text, count=1)
