"""SIGTERM, SIGHUP and Ctrl-C as bytes on a socket: seen at once by a thread, though the main thread is blocked in C++.

Python runs a signal's handler on the main thread, which does not come back from a collective while it waits for a rank;
the wake-up descriptor is written by the handler in C. Must be opened and closed on the main thread.
"""

import select
import signal
import socket
from contextlib import suppress

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 143}  # a terminal that is gone stops a run, too


def heeded() -> list[signal.Signals]:
    """The stop signals but those that whoever started this process had it ignore, as nohup does."""
    return [number for number in EXIT_CODES if signal.getsignal(number) is not signal.SIG_IGN]


class Signals:
    """The stop signals of this process, from `open` to `close`."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def open(self) -> None:
        """Take the signals over from Python."""
        self._previous = {number: signal.signal(number, lambda *_: None) for number in heeded()}
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Give them back."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wake(self) -> None:
        """End a `wait` that is under way, on another thread, with None."""
        with suppress(OSError):  # it is full: whoever waits wakes anyway
            self._sender.send(b"\0")

    def wait(self, timeout_s: float) -> signal.Signals | None:
        """The first stop signal within `timeout_s`; None earlier after `wake`."""
        ready, _, _ = select.select([self._receiver], [], [], max(0.0, timeout_s))
        if self._receiver not in ready:
            return None
        return next((signal.Signals(number) for number in self._receiver.recv(64) if number in EXIT_CODES), None)
