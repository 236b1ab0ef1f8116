"""Messages over plain TCP, moved by the thread that waits: no thread of its own.

gloo hands each message on through three threads of a rank, which is 32 changes of context for an all_reduce of 256 B
among 4 ranks, 5 to 10 ms on two cores. Here a send writes at once what the kernel takes, and whoever waits for anything
moves all that is under way: both directions, all peers, all groups. So no order of sends and receives deadlocks, at
any size. What the kernel did not take lies still while nobody waits: it holds SOCKET_BYTES a connection and direction.

There is one connection between each two ranks, whatever groups they share; a key tells the groups' messages apart.
"""

import select
import socket
import struct
import time
from typing import Protocol

from torch import Tensor

from workers.parallel.framing import Message
from workers.parallel.stream import Stream

SOCKET_BYTES = 4 << 20
ALONE_S = 0.02  # that a wait looks at one connection before it looks at all
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class LinkError(RuntimeError):
    """The connection to a rank has ended, or nothing came over it in time."""


class Goes(Protocol):
    """What is moved on with everything else."""

    def advance(self) -> bool:
        """Go on as far as messages have come; whether it is at its end."""


class Transport:
    """This rank's connections, by the rank at their other end; no wait is longer than `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.background: list[Goes] = []  # what was begun and not awaited
        self.groups = 0  # that use the connections
        self._streams: dict[int, Stream] = {}
        self._by_descriptor: dict[int, Stream] = {}
        self._poll = select.poll()
        self._full: set[int] = set()  # the ranks to which something is going that the kernel did not take

    @property
    def ranks(self) -> set[int]:
        """To whom there is a connection."""
        return set(self._streams)

    def add(self, rank: int, connection: socket.socket) -> None:
        """Send to and receive from `rank` by this connection from now on."""
        tune(connection)
        stream = self._streams[rank] = self._by_descriptor[connection.fileno()] = Stream(self, rank, connection)
        self._poll.register(stream.connection, select.POLLIN)

    def send(self, peer: int, key: bytes, tensor: Tensor) -> Message:
        """Begin to send the contiguous `tensor` to rank `peer`; raises LinkError."""
        stream = self._streams[peer]
        if stream.ended:
            raise lost(stream)
        try:
            message = stream.send(key, tensor)
        except OSError as error:
            self._lose(stream, error)
            raise lost(stream) from None
        if not message.done:
            self._ask(stream)
        return message

    def receive(self, peer: int, key: bytes, tensor: Tensor) -> Message:
        """Let the next message of `key` from rank `peer` come to the contiguous `tensor`; raises LinkError."""
        stream = self._streams[peer]
        try:
            return stream.receive(key, tensor)
        except OSError as error:
            self._lose(stream, error)
            raise lost(stream) from None

    def take(self, peer: int, key: bytes, tensor: Tensor) -> None:
        """`receive` and `wait` in one, which posts nothing where the message comes next and soon; raises LinkError."""
        stream = self._streams[peer]
        try:
            alone = not (self._full or self.background)
            message = (stream.take if alone else stream.receive)(key, tensor)
        except OSError as error:
            self._lose(stream, error)
            raise lost(stream) from None
        if not message.done:
            self.wait(message)

    def wait(self, message: Message) -> None:
        """Move what is under way until `message` is done; raises LinkError naming the rank."""
        stream = self._streams[message.peer]
        # One call in place of two, where the next thing to come is what is awaited.
        while not (message.done or self._full or self.background or stream.ended) and self._read(stream, message):
            pass
        deadline = time.monotonic() + self.timeout_s
        while not message.done:
            if stream.ended:
                raise lost(stream)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LinkError(f"nothing came of the message with rank {message.peer} in {self.timeout_s:g} s")
            self._move(left_s)

    def _read(self, stream: Stream, awaited: Message) -> bool:
        """Read from one connection alone; whether it had something within ALONE_S."""
        try:
            stream.read(awaited=awaited)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(stream, error)
        return True

    def _move(self, timeout_s: float) -> None:
        """Read and write wherever it can be done now; if nowhere, wait until it can."""
        for descriptor, events in self._poll.poll(timeout_s * 1000):
            stream = self._by_descriptor[descriptor]
            try:
                if events & select.POLLOUT:
                    stream.write()
                    self._ask(stream)
                if events & READABLE:
                    stream.read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                self._lose(stream, error)
        if self.background:
            self.background = [each for each in self.background if not each.advance()]

    def _ask(self, stream: Stream) -> None:
        """Have the poll say when a connection takes more, as long as something is going."""
        if bool(stream.going) != (stream.rank in self._full):
            self._poll.modify(stream.connection, select.POLLIN | (select.POLLOUT if stream.going else 0))
            self._full ^= {stream.rank}

    def _lose(self, stream: Stream, error: OSError) -> None:
        stream.ended = error.strerror or str(error)
        self._full.discard(stream.rank)
        self._poll.unregister(stream.connection)

    def flush(self) -> None:
        """Send what is still going, for at most `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while self._full and time.monotonic() < deadline:
            self._move(0.1)

    def leave(self) -> None:
        """One group less uses the connections; with the last one they are closed, once all was sent."""
        self.groups -= 1
        self.flush()
        if self.groups == 0:
            for stream in self._streams.values():
                stream.connection.close()
            self._streams.clear()
            self._by_descriptor.clear()


def lost(stream: Stream) -> LinkError:
    """What is raised where a connection has ended."""
    return LinkError(f"the connection to rank {stream.rank} has ended: {stream.ended}")


def tune(connection: socket.socket) -> None:
    """No waiting for more to send, large buffers, and a bound on each read."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, int(ALONE_S * 1e6)))
