"""A server thread that answers messages of authenticated peers; and a store on top of it.

PyTorch's TCPStore lets anybody who connects list, read and write all keys and values. This one offers the same to the
ranks of the run only (handshake.py). No message stops the server: a message that cannot be decoded closes its own
connection.

    message   length, 4 B | MessagePack of one struct of a tagged union (msgspec)
"""

import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from distlab.techniques.transport.handshake import NOBODY, Listener, OnRejected, Who, ignore_rejected

LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 1 << 28  # from a rank of the run: records of a run, lines of a script
READ_BYTES = 1 << 18
TICK_S = 0.1
FLUSH_S = 1.0  # time for a closing server to send its remaining data


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """A message; its type is its tag."""


ENCODER = msgspec.msgpack.Encoder()


def framed(message: Message) -> bytes:
    """Return the bytes of a message."""
    body = ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def pop_frames(received: bytearray) -> list[bytes]:
    """Remove the complete messages at the start of `received` and return them; raises ValueError if one is too long."""
    found, at = [], 0
    while len(received) - at >= LENGTH.size:
        (length,) = LENGTH.unpack_from(received, at)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has {length} bytes, allowed: at most {MAX_MESSAGE_BYTES}")
        end = at + LENGTH.size + length
        if end > len(received):
            break
        found.append(bytes(received[at + LENGTH.size : end]))
        at = end
    del received[:at]
    return found


class Peer:
    """One connection of an authenticated process. Compared by identity."""

    def __init__(self, connection: socket.socket, who: Who = NOBODY) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.who = connection, who
        self.received, self.unsent = bytearray(), bytearray()

    @property
    def source(self) -> tuple[str, int]:
        """Return the address and the port at its other end; empty once it has closed."""
        try:
            name = self.connection.getpeername()
        except OSError:
            return "", 0
        return str(name[0]), int(name[1])


class MessageServer:
    """Serves `listening` until `close`, all on one thread. Subclasses handle the messages."""

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        purpose: str,
        messages: Any,
        on_rejected: OnRejected = ignore_rejected,
    ) -> None:
        self.port = int(listening.getsockname()[1])
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._on_rejected = on_rejected
        self._selector = selectors.DefaultSelector()
        self._incoming = Listener(listening, self._selector, key, purpose, on_rejected=on_rejected)
        self.peers: set[Peer] = set()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=purpose, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the remaining data, then stop the thread and close all connections."""
        self._closed = True
        self._wake_sender.close()
        self._thread.join()

    def filenos(self) -> set[int]:
        """Return the descriptors of its connections; from any thread."""
        return {each.fileno() for each in (*self._incoming.sockets(), *(peer.connection for peer in list(self.peers)))}

    # To be overridden.

    def on_message(self, peer: Peer, message: Any) -> None:
        """Handle a message; an exception closes the connection."""

    def on_disconnect(self, peer: Peer) -> None:
        """Handle the end of a connection."""

    def tick(self, now: float) -> None:
        """Run after each poll of the connections, at least every TICK_S."""

    # The thread.

    def _run(self) -> None:
        while not self._closed:
            self._poll(TICK_S)
            self.tick(time.monotonic())
        deadline = time.monotonic() + FLUSH_S
        while any(peer.unsent for peer in self.peers) and time.monotonic() < deadline:
            self._poll(TICK_S)
        self._incoming.close()
        for peer in list(self.peers):
            self.drop(peer)
        self._selector.close()
        self._wake_receiver.close()

    def _poll(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._wake_receiver:
                self._selector.unregister(self._wake_receiver)
            elif isinstance(key.data, Peer):
                self._serve(key.data, events)
            elif (arrival := self._incoming.step(key)) is not None:
                peer = Peer(arrival[1], arrival[0])
                self.peers.add(peer)
                self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._incoming.expire()

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                with suppress(BlockingIOError):
                    new = peer.connection.recv(READ_BYTES)
                    if not new:
                        raise ConnectionResetError
                    peer.received += new
                for frame in pop_frames(peer.received):
                    self.on_message(peer, self._decoder.decode(frame))
        except OSError:
            self._end(peer)
        except Exception:  # a message that no rank of this version sends
            self._on_rejected("with an invalid message", peer.source)
            self._end(peer)

    def send(self, peer: Peer, message: Message) -> None:
        """Send what the kernel accepts now, and the rest later."""
        self.send_bytes(peer, framed(message))

    def send_bytes(self, peer: Peer, message: bytes) -> None:
        """Send a message that `framed` has encoded, once for many peers."""
        peer.unsent += message
        with suppress(OSError):  # its end is noticed at the next read
            self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        with suppress(BlockingIOError):
            del peer.unsent[: peer.connection.send(peer.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        with suppress(KeyError, ValueError):
            self._selector.modify(peer.connection, events, peer)

    def drop(self, peer: Peer) -> None:
        """Close a connection."""
        self.peers.discard(peer)
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _end(self, peer: Peer) -> None:
        if peer in self.peers:
            self.drop(peer)
            self.on_disconnect(peer)


# The store: the requests of a `dist.Store`, each with a number that its answer repeats.


class Request(Message):
    """A request of a store's client."""

    number: int


class Set(Request):
    key: bytes
    value: bytes


class Get(Request):
    """The value of `key`, answered once it exists."""

    key: bytes
    timeout_s: float


class Wait(Request):
    """Answered once all `keys` exist."""

    keys: list[bytes]
    timeout_s: float


class Check(Request):
    keys: list[bytes]


class Add(Request):
    key: bytes
    count: int


class CompareSet(Request):
    key: bytes
    expected: bytes
    desired: bytes


class Delete(Request):
    key: bytes


class Count(Request):
    pass


class Answer(Message):
    """The answer to request `number`; without a value the wait has timed out."""

    number: int
    value: bytes | None


StoreRequest = Set | Get | Wait | Check | Add | CompareSet | Delete | Count


class Pending(NamedTuple):
    """A request that is answered once all `keys` exist, or at its deadline."""

    peer: Peer
    request: Get | Wait
    keys: Sequence[bytes]
    deadline: float


class StoreServer(MessageServer):
    """Keys and values in one process; subclasses that do more pass other `messages` and `purpose`."""

    def __init__(
        self, listening: socket.socket, key: bytes, on_rejected: OnRejected = ignore_rejected,
        purpose: str = "store", messages: Any = StoreRequest,
    ) -> None:  # fmt: skip
        self._values: dict[bytes, bytes] = {}
        self._pending: list[Pending] = []
        super().__init__(listening, key, purpose, messages, on_rejected)

    def on_message(self, peer: Peer, message: StoreRequest) -> None:
        if isinstance(message, Get | Wait):
            keys = [message.key] if isinstance(message, Get) else message.keys
            pending = Pending(peer, message, keys, time.monotonic() + message.timeout_s)
            if not self._answer_if_ready(pending):
                self._pending.append(pending)
        else:
            self.send(peer, Answer(message.number, self._execute(message)))

    def _execute(self, request: StoreRequest) -> bytes:
        values = self._values
        match request:
            case Set(_, key, value):
                self._put(key, value)
            case Check(_, keys):
                return b"1" if all(key in values for key in keys) else b""
            case Add(_, key, count):
                total = str(int(values.get(key, b"0")) + count).encode()
                self._put(key, total)
                return total
            case CompareSet(_, key, expected, desired):  # as torch's
                if values.get(key, b"") == expected:
                    self._put(key, desired)
                return values.get(key, expected)
            case Delete(_, key):
                return b"1" if values.pop(key, None) is not None else b""
            case Count():
                return str(len(values)).encode()
        return b""

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        answered = [each for each in self._pending if key in each.keys and self._answer_if_ready(each)]
        self._pending = [each for each in self._pending if each not in answered]

    def _answer_if_ready(self, pending: Pending) -> bool:
        """Return whether all awaited keys exist, in which case the answer was sent."""
        if not all(key in self._values for key in pending.keys):
            return False
        value = self._values[pending.keys[0]] if isinstance(pending.request, Get) else b""
        self.send(pending.peer, Answer(pending.request.number, value))
        return True

    def on_disconnect(self, peer: Peer) -> None:
        self._pending = [each for each in self._pending if each.peer is not peer]

    def tick(self, now: float) -> None:
        late = [each for each in self._pending if each.deadline <= now]
        self._pending = [each for each in self._pending if each.deadline > now]
        for each in late:
            self.send(each.peer, Answer(each.request.number, None))
