"""The commands of `distlab`, one module each; `distlab/lab/config/commands.py` lists them with their help.

The `main` of a command's module parses its own arguments and returns the exit code. `run.py` parses the command's
name; only `run` and `explain` accept settings as arguments.
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


def prints_refusals(main: Callable[Words, int]) -> Callable[Words, int]:
    """Wrap a command: print refusals on the standard error, one line per reason, and exit with 2; likewise for a file
    that cannot be written, with 1 if the disk is full."""

    @wraps(main)
    def wrapped(*args: Words.args, **kwargs: Words.kwargs) -> int:
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

    return wrapped
