"""The Python stacks of a process under watch, taken without harm to it.

A thread of its own answers, with the interpreter's lock, when nothing changes a stack. faulthandler's signal needs no
lock, and reads whatever a frame is at that moment: of a process of Python 3.11 that called functions it killed one in
some thousand signals (python/cpython#116008), and once a script's rank in our own tests. So the signal is for an
interpreter whose lock is held in C, where no frame changes: the question was read, and for STACK_S nobody got the lock
though its holder slept or had a core.
"""

import _thread
import faulthandler
import fcntl
import os
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

STACKS = signal.SIGRTMAX - 1 if sys.platform == "linux" else signal.SIGUSR2  # the last way to ask for the stacks
READ_BYTES = 1 << 20
STACK_S = 0.5  # from a question until its answer is there; nothing else is done meanwhile
HELD_CPU_S = 0.05  # of a process that nobody else in it gets the lock from: ten times the interval of a switch
END = "\n\n"
FRAME = r'File "([^"]*)", line (\d+) in (.*)'


class Look(NamedTuple):
    """How the script's process is, by the kernel: its state, and seconds of processor time that its threads had."""

    state: str
    cpu_s: float
    peak_bytes: int


class Frame(NamedTuple):
    """A line of a Python stack."""

    file: str
    line: int
    function: str


def answer(asked: int, stacks: int) -> None:
    """In the process under watch, once: whoever writes into the pipe `asked` gets its stacks from the pipe `stacks`.

    No thread of threading's, which the script would count and wait for.
    """
    faulthandler.register(STACKS, file=stacks, all_threads=True, chain=False)

    def answering() -> None:
        while os.read(asked, 1):
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            os.write(stacks, END.encode())

    _thread.start_new_thread(answering, ())


class Stacks:
    """Asks a process, by our ends of its pipes; `look` is how it is."""

    def __init__(self, process: int, asked: int, stacks: int, look: Callable[[], Look | None]) -> None:
        self._process, self._asked, self._stacks, self._look = process, asked, stacks, look
        os.set_blocking(stacks, False)

    def taken(self) -> dict[int, list[Frame]]:
        """The stack of each thread by its number, innermost frame first; empty where none came."""
        self._read()  # what came too late for an earlier question
        if not self._unread():
            with suppress(OSError):  # it is gone
                os.write(self._asked, b"?")
        text = self._come()
        if not text and not self._unread() and self._lock_is_held():
            with suppress(ProcessLookupError):
                os.kill(self._process, STACKS)
            text = self._come()
        return parsed(text)

    def _unread(self) -> int:
        """Bytes of our question that nobody has read: the process is stopped, or had no core."""
        return int(struct.unpack("i", fcntl.ioctl(self._asked, termios.FIONREAD, struct.pack("i", 0)))[0])

    def _lock_is_held(self) -> bool:
        """Whether the one who was asked gets no lock though its holder sleeps, or has had a core."""
        before = self._look()
        ready, _, _ = select.select([self._stacks], [], [], STACK_S)
        after = self._look()
        if ready or before is None or after is None:
            return False
        return after.state in "SD" or after.cpu_s - before.cpu_s > HELD_CPU_S

    def _come(self) -> str:
        deadline, text = time.monotonic() + STACK_S, ""
        while time.monotonic() < deadline and not text.endswith(END):
            ready, _, _ = select.select([self._stacks], [], [], 0.05)
            text += self._read() if ready else (END if text else "")
            text = text.lstrip()  # the end of an earlier answer, which may come after its text
        return text

    def _read(self) -> str:
        try:
            return os.read(self._stacks, READ_BYTES).decode(errors="replace")
        except BlockingIOError:
            return ""


def parsed(text: str) -> dict[int, list[Frame]]:
    """The stacks that faulthandler wrote, but for that of the one who answered."""
    found: dict[int, list[Frame]] = {}
    for part in re.split(r"(?=^(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE):
        head = re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", part)
        if head:
            frames = [Frame(file, int(line), name) for file, line, name in re.findall(FRAME, part)]
            if not frames or (frames[-1].file, frames[-1].function) != (__file__, "answering"):
                found[int(head[1], 16)] = frames
    return found
