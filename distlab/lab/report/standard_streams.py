"""Standard streams that cannot be written: the work continues without them, and learns the reason.

A stream that was closed before the start counts as one whose first write fails. Its number is given to /dev/null at
once: otherwise a socket or file would get it, together with everything printed.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STREAMS = ("stdin", "stdout", "stderr")
OF_A_STREAM = (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO)
OUTPUT_FAILED = "output     nothing more is printed ({}): the run continues, and its log file has everything"


def open_standard_streams() -> None:
    """Occupy the numbers 0, 1 and 2 if they are free, before anything else is opened; print by whole lines."""
    for number, name in enumerate(STREAMS):
        with suppress(OSError):
            os.fstat(number)
            continue
        # Failed prints must be noticed, so the write has to fail, except for errors, which have no other stream.
        os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)  # gets the lowest free number: this one
        os.set_inheritable(number, True)  # otherwise a file of a child process gets the number
        mode = "r" if number == 0 else "w"
        setattr(sys, name, open(number, mode, buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # With PYTHONUNBUFFERED each argument of `print` is a separate write, which mixed the lines of ranks that
            # share a stream, as under torchrun. Characters that a terminal cannot show are escaped, and raise no error.
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")


@contextmanager
def output_as_errors() -> Iterator[None]:
    """Redirect output to the standard error inside the block, also that of started processes."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


def printed(text: str, end: str = "\n") -> str:
    """Print `text`; return the reason if it failed, else "". After a failure nothing more is printed."""
    try:
        print(text, end=end, flush=True)
    except (OSError, ValueError) as error:
        return silenced(error)
    return ""


def of_a_stream(error: OSError) -> bool:
    """Return whether the error is of a write to a descriptor, such as standard output, and not of a named file."""
    return error.errno in OF_A_STREAM and error.filename is None


def silenced(error: Exception) -> str:
    """Redirect all output to /dev/null from now on, also buffered output; return the reason in words."""
    with suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        sys.stdout.flush()
    return str(getattr(error, "strerror", None) or error)
