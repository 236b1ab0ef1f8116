"""The lines of a rank, one to each other: the end of one is the death of the process at its other end.

The kernel closes the sockets of a process that is killed, so its peers read the end of the line within milliseconds;
a process that is paused or cut off closes nothing, and is silent. The first is certain and is said here, the second is
left to who counts silences (cluster/watch.py). Every rank has a line to every other, so no rank is a hub.

Lines come and go on two threads: that of the lines accepts and reads, the main one dials and hangs up, perhaps while
the other hears a greeting. So whatever changes which lines there are does it with the lock.
"""

import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from workers.parallel.line import Address, Greeting, Line, Message, first_line, parsed, written

TICK_S = 0.05
DIAL_S = 1.0  # for one connection to be accepted
ENDED = "ended"  # the kind of what this rank tells itself when a line ends


class Lines:
    """The lines of one rank, read by a thread of their own; `heard` holds (rank, life, message) in their order."""

    def __init__(self, rank: int, ip: str, secret: str) -> None:
        self.rank, self.ip, self.life = rank, ip, time.time_ns()
        self.heard: queue.SimpleQueue[tuple[int, int, Message]] = queue.SimpleQueue()
        # On the thread of the lines, as soon as it is heard.
        self.on_news: Callable[[int, int, Message], None] = lambda rank, life, message: None  # noqa: ARG005
        self.book: dict[int, Address] = {}
        self._greeting = Greeting(rank, secret)
        self._lines: dict[int, Line] = {}
        self._lock = threading.RLock()
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listening = socket.create_server((ip, 0), family=family, backlog=64)
        self._listening.setblocking(False)  # whoever called may have hung up before it is accepted
        self.port = int(self._listening.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._connections = {self._listening}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    # --- what the main thread asks for ---

    def dial(self, ranks: Iterable[int], timeout_s: float = DIAL_S) -> list[int]:
        """Open a line to each of `ranks` in the book; returns those that did not answer."""
        return [rank for rank in ranks if not self._dial(rank, timeout_s)]

    def send(self, rank: int, message: Message) -> None:
        """Say it to `rank`; nothing where the line has ended, of which `heard` tells."""
        with self._lock:
            line = self._lines.get(rank)
            if line is not None:
                with suppress(OSError):
                    line.connection.sendall(written(message))

    def tell(self, ranks: Iterable[int], message: Message) -> None:
        for rank in ranks:
            self.send(rank, message)

    def open(self) -> dict[int, int]:
        """The lives at the other ends, by rank."""
        with self._lock:
            return {rank: line.life for rank, line in self._lines.items()}

    def filenos(self) -> set[int]:
        """The descriptors of all that is open here."""
        with self._lock:
            return {connection.fileno() for connection in self._connections}

    def hang_up(self) -> None:
        """Close every line without a word, as the kernel does for a process that is killed; begin another life."""
        with self._lock:
            self._lines = {}
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    self._drop(key.data)
            self.life = time.time_ns()
        while not self.heard.empty():  # what was meant for the life that is over
            self.heard.get()

    def close(self) -> None:
        """End the thread, and all lines."""
        self._closed = True
        self._thread.join()
        self.hang_up()
        self._listening.close()
        self._selector.close()

    # --- how lines come and go ---

    def _dial(self, rank: int, timeout_s: float) -> bool:
        address = self.book[rank]
        with self._lock:
            line = self._opened(socket.socket(socket.AF_INET6 if ":" in address.ip else socket.AF_INET))
        line.dialled = True
        try:
            line.connection.settimeout(timeout_s)
            line.connection.connect((address.ip, address.port))
            line.connection.sendall(written(self._greeting.words(self.life, rank)))
            if not self._greeting.heard(line, parsed(first_line(line.connection))):
                raise ConnectionResetError
        except OSError:
            self._drop(line)
            return False
        line.connection.settimeout(DIAL_S)
        self._adopt(line)
        return True

    def _adopt(self, line: Line) -> None:
        """From now on this is the line to its rank; that of a life before has ended.

        Two that dial each other at once have two lines: both are read, and what is said goes over the lower rank's.
        """
        assert line.rank is not None
        with self._lock:
            if line.connection.fileno() < 0:
                return  # this rank has hung up since it heard the greeting
            line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            before = self._lines.get(line.rank)
            again = before is not None and before.life == line.life
            if not again or line.dialled == (self.rank < line.rank):
                self._lines[line.rank] = line
            if before is not None and not again:
                self._drop(before)
            with suppress(KeyError, ValueError):
                self._selector.unregister(line.connection)
            self._selector.register(line.connection, selectors.EVENT_READ, line)
        if before is not None and not again:
            self._tell_self(before, {"kind": ENDED})

    def _opened(self, connection: socket.socket) -> Line:
        """With the lock since before there was the connection: what a group opens is told from it by `filenos`."""
        connection.settimeout(DIAL_S)
        self._connections.add(connection)
        return Line(connection)

    def _drop(self, line: Line) -> None:
        with self._lock:
            with suppress(KeyError, ValueError):
                self._selector.unregister(line.connection)
            self._connections.discard(line.connection)
            line.connection.close()

    def _tell_self(self, line: Line, message: Message) -> None:
        assert line.rank is not None
        self.heard.put((line.rank, line.life, message))
        self.on_news(line.rank, line.life, message)

    # --- the thread ---

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(TICK_S):
                if key.data is None:
                    self._accept()
                else:
                    self._listen(key.data)

    def _accept(self) -> None:
        with suppress(OSError), self._lock:
            connection, _ = self._listening.accept()
            self._selector.register(connection, selectors.EVENT_READ, self._opened(connection))

    def _listen(self, line: Line) -> None:
        try:
            messages = line.read()
        except (OSError, ValueError):
            self._end(line)
            return
        for message in messages:
            if line.rank is not None:
                self._tell_self(line, message)
            elif self._greeting.heard(line, message):
                with suppress(OSError):
                    line.connection.sendall(written(self._greeting.words(self.life, line.rank or 0)))
                self._adopt(line)
            else:
                self._drop(line)
                return

    def _end(self, line: Line) -> None:
        with self._lock:
            ours = line.rank is not None and self._lines.get(line.rank) is line
            if ours:
                del self._lines[line.rank or 0]
            self._drop(line)
        if ours:
            self._tell_self(line, {"kind": ENDED})
