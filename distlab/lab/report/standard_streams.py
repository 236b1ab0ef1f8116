"""Standard streams that cannot be written end nothing: the work goes on without them, and learns why.

A stream that was closed before the start is one whose first write fails. Its number is taken by /dev/null at once:
else a socket or a file of ours would get it, and whatever is printed would go there.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STREAMS = ("stdin", "stdout", "stderr")
OF_A_STREAM = (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO)
UNHEARD = "output     nothing more is printed ({}): the run continues, and its log file has everything"


def open_standard_streams() -> None:
    """Take the numbers 0, 1 and 2 where they are free, before anything else does; print by whole lines."""
    for number, name in enumerate(STREAMS):
        with suppress(OSError):
            os.fstat(number)
            continue
        # Of what is printed somebody may be told that nobody reads it: so the write has to fail. Errors are said to
        # nobody in any case.
        os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)  # takes the lowest number that is free: this
        os.set_inheritable(number, True)  # else a file of a process that this one starts has the number
        mode = "r" if number == 0 else "w"
        setattr(sys, name, open(number, mode, buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # With PYTHONUNBUFFERED each argument of `print` is a write of its own, and the lines of ranks that share a
            # stream, as under torchrun, were mixed. What a terminal cannot show is escaped, and ends nothing.
            stream.reconfigure(line_buffering=True, write_through=False, errors="backslashreplace")


@contextmanager
def output_as_errors() -> Iterator[None]:
    """What is printed meanwhile goes to the standard error, of processes that are started too."""
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
    """Print `text`; why it could not be, empty where it was. After that nothing more is tried."""
    try:
        print(text, end=end, flush=True)
    except (OSError, ValueError) as error:
        return silenced(error)
    return ""


def of_a_stream(error: OSError) -> bool:
    """Whether it is of a write to a descriptor, as that of the standard output is, and not of a file by its name."""
    return error.errno in OF_A_STREAM and error.filename is None


def silenced(error: Exception) -> str:
    """Send to /dev/null what is printed from now on, what waits to be written too; returns the reason in words."""
    with suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        sys.stdout.flush()
    return str(getattr(error, "strerror", None) or error)
