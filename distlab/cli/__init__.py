"""The commands of `distlab`, a module for each; `distlab/lab/config/commands.py` lists them with their help.

The `main` of a command's module reads its own words and returns the exit code. `run.py` reads which command was typed;
`run` and `explain` alone take settings as words.
"""

import errno
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from distlab.lab.config import Refusal
from distlab.lab.report.standard_streams import of_a_stream
from distlab.lab.report.table import log_line, printable

Words = ParamSpec("Words")


def tells_refusals(main: Callable[Words, int]) -> Callable[Words, int]:
    """A command whose refusals are told on the standard error, a line for each reason, and end with 2; so does a file
    that cannot be written, with 1 where the disk is full."""

    @wraps(main)
    def told(*args: Words.args, **kwargs: Words.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except Refusal as error:
            print("\n".join(log_line("refused", fault) for fault in error.faults), file=sys.stderr)
        except OSError as error:
            if of_a_stream(error):
                raise
            print(
                log_line("broken", f"{printable(str(error.filename))} cannot be written: {error.strerror}"),
                file=sys.stderr,
            )
            return 1 if error.errno == errno.ENOSPC else 2
        return 2

    return told
