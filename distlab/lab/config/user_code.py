"""Run a user's code in a lab process: its exits become exceptions, and before the watch starts it has a time limit.

Otherwise a file that calls sys.exit(0) or os._exit(0) would end its rank as if all checks had passed.
"""

import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ENDINGS = ("_exit", "abort", "execv", "execve")  # of os: those that end this program without an exception
LIBRARIES = ("<frozen", str(Path(__file__).parents[2]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


observed_processes = set[int]()


class Exited(BaseException):
    """A user's code has ended the process, or tried to; the message names the call and the line."""


def is_users(file: str) -> bool:
    """Return whether a file belongs neither to a library nor to the lab."""
    return not file.startswith(LIBRARIES)


def place_in(frames: Iterable[tuple[str, int]]) -> str:
    """Return file and line of the first frame in a user's file; empty if there is none."""
    return next((f"{Path(file).name}:{line}" for file, line in frames if is_users(file)), "")


def place_of(error: BaseException) -> str:
    """Return the innermost line in a user's file that an exception passed."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return place_in((each.filename, each.lineno or 0) for each in frames)


def stack_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def lines_of(frames: Iterable[FrameType]) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]


def ended_by(call: str, place: str) -> Exited:
    return Exited(f"ended the process by {call} at {place}, before its checks ran")


def raise_exited(call: str, place: str) -> NoReturn:
    raise ended_by(call, place)


def observe_exits(report: Callable[[str, str], None]) -> None:
    """Call `report` with each call by which a user's code ends this process, and its line, before the end; if `report`
    raises, the process continues. Forked children of the code are exempt. Takes effect once per process."""
    process = os.getpid()
    if process in observed_processes:
        return
    observed_processes.add(process)

    def observed(name: str, end: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            frames = lines_of(stack_from(sys._getframe(1)))
            while frames[0][0] == os.execlp.__code__.co_filename:  # which calls execv
                del frames[0]
            if os.getpid() == process and is_users(frames[0][0]):
                code = "".join(str(each) for each in args if isinstance(each, int))
                report(f"os.{name}({code})", place_in(frames))
            return end(*args)

        return call

    module: Any = os
    for name in ENDINGS:
        setattr(module, name, observed(name, getattr(os, name)))


def exited(error: BaseException) -> BaseException:
    """Return the same error; for sys.exit's, an Exited with its traceback."""
    if not isinstance(error, SystemExit):
        return error
    call = f"sys.exit({'' if error.code is None else repr(error.code)})"
    return ended_by(call, place_of(error)).with_traceback(error.__traceback__)


@contextmanager
def exits_raised() -> Iterator[None]:
    """Turn sys.exit inside the block into an Exited."""
    try:
        yield
    except SystemExit as error:
        raise exited(error) from None


# Before the watch starts, no rank notices if another one ends or hangs in a user's code.


@contextmanager
def bounded(bound_s: float, on_late: Callable[[str], None]) -> Iterator[None]:
    """Call `on_late`, on another thread, with the line of a user's code that has not ended after `bound_s`."""
    over, main = threading.Event(), threading.get_ident()
    callers = list(stack_from(sys._getframe()))  # one of them may be a user's, too

    def wait() -> None:
        while not over.wait(bound_s):
            inside = takewhile(lambda frame: frame not in callers, stack_from(sys._current_frames().get(main)))
            if place := place_in(lines_of(inside)):
                bound = f"{bound_s:g} s (LAB_JOIN_TIMEOUT_S)"
                on_late(f"the file still runs at {place} after {bound}, so its ranks cannot start")
                return

    thread = threading.Thread(target=wait, name="bound", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def refusing_exits(bound_s: float, refusal: Callable[[list[str]], Exception]) -> Iterator[None]:
    """Raise `refusal` with a sentence if a user's code in the block ends the process, or raises Ctrl-C's
    KeyboardInterrupt itself; if it runs longer than `bound_s`, end the process with exit code 2."""
    observe_exits(raise_exited)
    stopped: list[int] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    handles_sigint = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if handles_sigint:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        with bounded(bound_s, refuse_late), exits_raised():
            yield
    except Exited as error:
        raise refusal([f"the file {error}"]) from error
    except KeyboardInterrupt as error:
        if stopped or not (place := place_of(error)):
            raise
        raise refusal([f"the file raised KeyboardInterrupt at {place}"]) from error
    finally:
        if handles_sigint:
            signal.signal(signal.SIGINT, before)


def refuse_late(sentence: str) -> None:
    os.write(1, f"refused    {sentence}\n".encode())
    os._exit(2)
