"""One line to another rank: a TCP connection that carries words, JSON a line each, once both ends have proven the key.

A process names itself by rank and *life*, a number of its own: a rank that comes back is another process. Words are
those of a process of the run, and still read field by field: a defective one ends nobody's thread.
"""

import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from distlab.transport.handshake import NOBODY, Closed, Door, TurnedAway, Who, listen, prove, unheeded

Message = dict[str, Any]

MAX_BYTES = 1 << 20  # of one message


class Address(NamedTuple):
    ip: str
    port: int
    store_port: int


class Line:
    """One connection, to the process that `who` names once it is proven."""

    def __init__(self, connection: socket.socket, who: Who = NOBODY, *, dialled: bool = False) -> None:
        self.connection, self.who, self.received = connection, who, b""
        self.dialled = dialled  # by this rank

    def read(self) -> list[Any]:
        """What has come, None for what is no JSON; raises OSError at its end."""
        with suppress(BlockingIOError):
            new = self.connection.recv(1 << 16)
            if not new:
                raise ConnectionResetError
            self.received += new
        if len(self.received) > MAX_BYTES:
            raise ConnectionResetError
        *whole, self.received = self.received.split(b"\n")
        return [parsed(text) for text in whole]


def parsed(text: bytes) -> Any:
    """JSON, or None where it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def whole(value: Any) -> bool:
    """An integer that any number of ours may be; True and False are none."""
    return type(value) is int and -(2**63) <= value < 2**64


def members(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and all(map(whole, each)) for each in value
    )


def opened(value: Any) -> bool:
    """An address, as JSON has it."""
    return (
        isinstance(value, list)
        and len(value) == len(Address._fields)
        and isinstance(value[0], str)
        and all(type(port) is int and 0 <= port < 1 << 16 for port in value[1:])
    )


FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "ask": {"as": lambda value: isinstance(value, str)},
    "call": {"call": whole, "why": lambda value: isinstance(value, str)},
    "here": {"call": whole, "number": whole, "members": members, "report": lambda value: isinstance(value, dict)},
    "view": {"number": whole, "members": members, "plan": lambda value: isinstance(value, dict)},
    "done": {"number": whole},
    "left": {"number": whole},
}
MEMBER = {"rank": int, "host": str, "ip": str, "udp_port": int, "pid": int}
OF_ONE_BACK: dict[str, Callable[[Any], bool]] = {
    "opened": opened,
    "member": lambda value: isinstance(value, dict) and {name: type(each) for name, each in value.items()} == MEMBER,
}


def is_right(message: Any) -> bool:
    """Whether a message has what who reads it on the thread of the lines takes from it."""
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return False
    fields = FIELDS.get(message["kind"], {})
    if message["kind"] == "ask" and "opened" in message:
        fields = fields | OF_ONE_BACK
    return all(name in message and shape(message[name]) for name, shape in fields.items())


def written(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def book_of(entries: Mapping[int, Iterable[Any]]) -> dict[int, Address]:
    """Addresses by rank, as they came over JSON."""
    return {int(rank): Address(*entry) for rank, entry in entries.items()}


# The lines of a rank, one to each other: the end of one is the death of the process at its other end.
#
# The kernel closes the sockets of a process that is killed, so its peers read the end of the line within milliseconds;
# a process that is paused or cut off closes nothing, and is silent. The first is certain and is said here, the second
# is left to who counts silences (distlab/cluster/watchdog.py). Every rank has a line to every other, so no rank is a
# hub.
#
# Lines come and go on two threads: that of the lines accepts and reads, the main one dials and hangs up, perhaps
# while the other lets somebody in. So whatever changes which lines there are does it with the lock.

TICK_S = 0.05
DIAL_S = 1.0  # for one connection to be accepted
ENDED = "ended"  # the kind of what this rank tells itself when a line ends


class Lines:
    """The lines of one rank, read by a thread of their own; `heard` holds (rank, life, message) in their order."""

    def __init__(self, rank: int, ip: str, key: bytes, turned_away: TurnedAway = unheeded) -> None:
        self.rank, self.ip, self.life = rank, ip, time.time_ns()
        self.heard: queue.SimpleQueue[tuple[int, int, Message]] = queue.SimpleQueue()
        # On the thread of the lines, as soon as it is heard.
        self.on_news: Callable[[int, int, Message], None] = lambda rank, life, message: None  # noqa: ARG005
        self.book: dict[int, Address] = {}
        self._key, self._turned_away = key, turned_away
        self._lines: dict[int, Line] = {}
        self._lock = threading.RLock()
        listening = listen(ip)
        self.port = int(listening.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._door = Door(listening, self._selector, key, purpose(rank), lambda: self.me, turned_away)
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    @property
    def me(self) -> Who:
        return Who(self.rank, self.life)

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
            return {rank: line.who.life for rank, line in self._lines.items()}

    def filenos(self) -> set[int]:
        with self._lock:
            return {connection.fileno() for connection in (*self._connections, *self._door.sockets())}

    def hang_up(self) -> None:
        """Close every line without a word, as the kernel does for a process that is killed; begin another life."""
        with self._lock:
            self._lines = {}
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, Line):
                    self._drop(key.data)
            self._door.send_all_away()
            self.life = time.time_ns()
        while not self.heard.empty():  # what was meant for the life that is over
            self.heard.get()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        self.hang_up()
        self._door.close()
        self._selector.close()

    # --- how lines come and go ---

    def _dial(self, rank: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (line := self._dialled(rank, deadline)) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(TICK_S)
        if line.who.rank != rank:
            return False
        with self._lock:
            before = self._adopt(line)
        self._tell_end(before)
        return True

    def _dialled(self, rank: int, deadline: float) -> Line | None:
        """A line to `rank`, to nobody where it did not answer; None where it hung up and may be dialled again."""
        address = self.book[rank]
        with self._lock:  # since before there is the connection: what a group opens is told from it by `filenos`
            line = Line(socket.socket(socket.AF_INET6 if ":" in address.ip else socket.AF_INET), dialled=True)
            self._connections.add(line.connection)
        try:
            line.connection.settimeout(max(0.01, deadline - time.monotonic()))
            line.connection.connect((address.ip, address.port))
            left_s = deadline - time.monotonic()
            line.who = prove(line.connection, self._key, purpose(rank), self.me, left_s)
        except (Closed, ConnectionResetError, BrokenPipeError):  # it may have had too much to do
            self._drop(line)
            return None
        except OSError:
            self._drop(line)
        else:
            if line.who.rank != rank:
                self._drop(line)
        return line

    def _adopt(self, line: Line) -> Line | None:
        """From now on this is the line to its rank; that of a life before, if there was one, has ended.

        Two that dial each other at once have two lines: both are read, and what is said goes over the lower rank's.
        """
        if line.connection.fileno() < 0:
            return None  # this rank has hung up since the other end was proven
        line.connection.settimeout(DIAL_S)
        line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(line.connection)
        before = self._lines.get(line.who.rank)
        again = before is not None and before.who == line.who
        if not again or line.dialled == (self.rank < line.who.rank):
            self._lines[line.who.rank] = line
        self._selector.register(line.connection, selectors.EVENT_READ, line)
        if before is None or again:
            return None
        self._drop(before)
        return before

    def _drop(self, line: Line) -> None:
        with self._lock:
            with suppress(KeyError, ValueError):
                self._selector.unregister(line.connection)
            self._connections.discard(line.connection)
            line.connection.close()

    def _tell_self(self, line: Line, message: Message) -> None:
        self.heard.put((*line.who, message))
        self.on_news(*line.who, message)

    # --- the thread ---

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(TICK_S):
                if isinstance(key.data, Line):
                    self._listen(key.data)
                else:
                    self._let_in(key)
            with self._lock:
                self._door.expire()

    def _let_in(self, key: selectors.SelectorKey) -> None:
        """Go on with who dials. With the lock until its line is there: it is told that it is let in before."""
        with self._lock:
            come = self._door.step(key)
            before = None if come is None else self._adopt(Line(come[1], come[0]))
        self._tell_end(before)

    def _listen(self, line: Line) -> None:
        try:
            messages = line.read()
        except (OSError, ValueError):
            self._end(line)
            return
        for message in messages:
            if is_right(message):
                self._tell_self(line, message)
            else:
                self._turned_away("not as its kind is written", line.connection.getpeername()[:2])

    def _end(self, line: Line) -> None:
        with self._lock:
            ours = self._lines.get(line.who.rank) is line
            if ours:
                del self._lines[line.who.rank]
            self._drop(line)
        if ours:
            self._tell_end(line)

    def _tell_end(self, line: Line | None) -> None:
        if line is not None:
            self._tell_self(line, {"kind": ENDED})


def purpose(rank: int) -> str:
    return f"line to rank {rank}"
