"""The store of a run at work: keys and values in one process, for those who have proven the key (handshake.py).

PyTorch's TCPStore gives anybody who connects all keys (`list_keys`) and all values, to read and to write. This one is
the same for those of the run, and closed to all others. A thread of its own serves all connections, and no request ends
it: one that cannot be read ends its own connection.

    request   number, length | op, milliseconds, [length, field] ...
    answer    number, length | status, bytes
"""

import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from distlab.transport.handshake import Door, TurnedAway, unheeded

FRAME = struct.Struct("!QI")
REQUEST = struct.Struct("!BI")
LENGTH = struct.Struct("!I")
SET, GET, WAIT, CHECK, ADD, COMPARE_SET, DELETE, COUNT = range(8)
DONE, TIMED_OUT = b"\0", b"\1"
MAX_FRAME_BYTES = 1 << 28  # of who has the key: a rank's records, told lines
READ_BYTES = 1 << 18
TICK_S = 0.5


def packed(op: int, timeout_ms: int, fields: Sequence[bytes]) -> bytes:
    """A request without its frame."""
    return REQUEST.pack(op, timeout_ms) + b"".join(LENGTH.pack(len(each)) + each for each in fields)


def unpacked(request: bytes) -> tuple[int, int, list[bytes]]:
    """Op, milliseconds and fields of a request; raises ValueError where it is none."""
    fields, at = [], REQUEST.size
    try:
        op, timeout_ms = REQUEST.unpack_from(request)
        while at < len(request):
            end = at + LENGTH.size + LENGTH.unpack_from(request, at)[0]
            if end > len(request):
                raise ValueError("a field that is cut")
            fields.append(request[at + LENGTH.size : end])
            at = end
    except struct.error as error:
        raise ValueError(str(error)) from None
    return op, timeout_ms, fields


def frames_of(received: bytearray) -> list[tuple[int, bytes]]:
    """The whole frames at the beginning of `received`, which are taken from it; raises ValueError for one too long."""
    found, at = [], 0
    while len(received) - at >= FRAME.size:
        number, length = FRAME.unpack_from(received, at)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} B")
        end = at + FRAME.size + length
        if end > len(received):
            break
        found.append((number, bytes(received[at + FRAME.size : end])))
        at = end
    del received[:at]
    return found


class Served:
    """One connection of somebody who has the key."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.received, self.going = connection, bytearray(), bytearray()


class Waiting(NamedTuple):
    """A request that is answered once all `keys` are there, or at its deadline."""

    served: Served
    number: int
    keys: list[bytes]
    deadline: float
    gives: bool  # the value of the first key


class StoreHost:
    """Serves at `listening` until `close`."""

    def __init__(self, listening: socket.socket, key: bytes, turned_away: TurnedAway = unheeded) -> None:
        self.port = int(listening.getsockname()[1])
        self._values: dict[bytes, bytes] = {}
        self._waiting: list[Waiting] = []
        self._selector = selectors.DefaultSelector()
        self._door = Door(listening, self._selector, key, "store", turned_away=turned_away)
        self._served: set[Served] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            soonest = min((each.deadline for each in self._waiting), default=time.monotonic() + TICK_S)
            for key, events in self._selector.select(min(TICK_S, max(0.0, soonest - time.monotonic()))):
                if not self._door.owns(key):
                    self._serve(key.data, events)
                elif (come := self._door.step(key)) is not None:
                    self._welcome(come[1])
            self._door.expire()
            self._answer_late(time.monotonic())
        self._door.close()
        for served in list(self._served):
            self._end(served)
        self._selector.close()

    def _welcome(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        served = Served(connection)
        self._served.add(served)
        self._selector.register(connection, selectors.EVENT_READ, served)

    def _serve(self, served: Served, events: int) -> None:
        """Read and answer; whatever is wrong with a request ends its own connection."""
        try:
            if events & selectors.EVENT_WRITE:
                self._send(served)
            if events & selectors.EVENT_READ:
                with suppress(BlockingIOError):
                    new = served.connection.recv(READ_BYTES)
                    if not new:
                        raise ConnectionResetError
                    served.received += new
                for number, request in frames_of(served.received):
                    self._take(served, number, *unpacked(request))
        except Exception:  # of a request that nobody who is right has sent
            self._end(served)

    def _take(self, served: Served, number: int, op: int, timeout_ms: int, fields: list[bytes]) -> None:
        """Do what is asked; raises where it is not as it is written."""
        values = self._values
        if op in (GET, WAIT):
            waiting = Waiting(served, number, fields, time.monotonic() + timeout_ms / 1000, op == GET)
            if not self._is_there(waiting):
                self._waiting.append(waiting)
            return
        answer = b""
        if op == SET:
            key, value = fields
            self._put(key, value)
        elif op == CHECK:
            answer = b"1" if all(key in values for key in fields) else b""
        elif op == ADD:
            key, count = fields
            answer = str(int(values.get(key, b"0")) + int(count)).encode()
            self._put(key, answer)
        elif op == COMPARE_SET:  # as torch's
            key, expected, desired = fields
            if values.get(key, b"") == expected:
                self._put(key, desired)
            answer = values.get(key, expected)
        elif op == DELETE:
            answer = b"1" if values.pop(fields[0], None) is not None else b""
        elif op == COUNT:
            answer = str(len(values)).encode()
        else:
            raise ValueError(f"op {op}")
        self._answer(served, number, DONE + answer)

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        awaited = [each for each in self._waiting if key in each.keys]
        answered = [each for each in awaited if self._is_there(each)]
        if answered:
            self._waiting = [each for each in self._waiting if each not in answered]

    def _is_there(self, waiting: Waiting) -> bool:
        """Whether all that is waited for is there; then it was answered."""
        if not all(key in self._values for key in waiting.keys):
            return False
        value = self._values[waiting.keys[0]] if waiting.gives else b""
        self._answer(waiting.served, waiting.number, DONE + value)
        return True

    def _answer_late(self, now: float) -> None:
        late = [each for each in self._waiting if each.deadline <= now]
        if late:
            self._waiting = [each for each in self._waiting if each.deadline > now]
        for each in late:
            self._answer(each.served, each.number, TIMED_OUT)

    def _answer(self, served: Served, number: int, answer: bytes) -> None:
        served.going += FRAME.pack(number, len(answer)) + answer
        with suppress(OSError):  # who has gone is found gone when it is read from
            self._send(served)

    def _send(self, served: Served) -> None:
        """What the kernel takes now; what it does not is sent when it does."""
        with suppress(BlockingIOError):
            del served.going[: served.connection.send(served.going)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if served.going else 0)
        with suppress(KeyError, ValueError):
            self._selector.modify(served.connection, events, served)

    def _end(self, served: Served) -> None:
        self._served.discard(served)
        self._waiting = [each for each in self._waiting if each.served is not served]
        with suppress(KeyError, ValueError):
            self._selector.unregister(served.connection)
        served.connection.close()
