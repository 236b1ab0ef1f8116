"""Messages over plain TCP, moved by whichever thread waits; there is no background thread.

gloo passes each message through three threads of a rank: 32 context switches for an all_reduce of 256 B among 4 ranks,
5 to 10 ms on two cores. Here a send writes at once what the kernel accepts, and a wait for any message moves all
messages: both directions, all peers, all groups. So no order of sends and receives deadlocks, at any size. Data that
the kernel did not accept stays until some wait; the kernel buffers SOCKET_BYTES per connection and direction.

Every two ranks share one connection for all their groups; a key separates the groups' messages.
"""

import ctypes
import hashlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

# A message on a connection: a header with its key and length, then the tensor's own memory.

KEY_BYTES = 16
# 64 B, so that both ends copy between equally aligned addresses: saves a third of a read's time.
HEAD = struct.Struct(f"={KEY_BYTES}sQ40x")
MEMORY = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
PYBUF_WRITE = 0x200  # from CPython's API: the buffer is writable
Wait = Callable[["Message"], None]  # returns once the message is done


class Message:
    """A tensor to or from rank `peer`; `done` once it may be changed again, or has arrived.

    `rest` is what the kernel has not accepted yet, or the memory still to be filled. `late_receive` is a receive posted
    while this message was arriving: it gets a copy. The message keeps the tensor's memory alive.
    """

    __slots__ = ("_wait", "done", "head", "late_receive", "memory", "peer", "rest")

    def __init__(self, wait: Wait, peer: int, head: bytes, memory: object, rest: list[memoryview]) -> None:
        self._wait, self.peer, self.head, self.memory, self.rest = wait, peer, head, memory, rest
        self.done = False
        self.late_receive: Message | None = None

    def wait(self) -> None:
        """Return once it is done; raises RuntimeError if the connection has ended."""
        if not self.done:
            self._wait(self)


def copy_early(early: Message) -> None:
    """Copy an early message to its late receive; raises OSError if their sizes differ."""
    late_receive = early.late_receive
    assert late_receive is not None
    if late_receive.head != early.head:
        raise wrong_size(late_receive, early.head)
    late_receive.rest[0][:] = early.rest[0]
    late_receive.done = True


def unless_closed(count: int) -> int:
    """Return `count` of bytes read; raises OSError if it is 0, at the end of the connection."""
    if count == 0:
        raise ConnectionResetError("it was closed")
    return count


def wrong_size(awaited: Message, head: bytes) -> OSError:
    """Return the error for two ranks that disagree about the length of a message."""
    return ConnectionAbortedError(f"it sent {HEAD.unpack(head)[1]} bytes, this rank expected {len(awaited.rest[0])}")


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor. `tensor.numpy()` would forbid resizing its storage, by which ZeRO-3
    frees memory; a ctypes array would create a type per length, 20 us."""
    memory: memoryview = MEMORY(tensor.data_ptr(), tensor.numel() * tensor.element_size(), PYBUF_WRITE)
    return memory


# The connection to one rank as a stream of messages.
#
# A message is sent from the tensor's own memory, with its header in one call, and arrives in the tensor posted for its
# key. A message that arrives before its receive is kept aside, so that those behind it can be read. Nothing here waits;
# that is done by Transport.

BUFFER_BYTES = 4096  # read before the addressee is known, so this much is copied once more


class Stream:
    """One connection: outgoing messages, posted receives, and early messages."""

    def __init__(self, wait: Wait, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.ended = ""  # the reason
        self.outgoing: deque[Message] = deque()
        self._wait = wait
        self._completed = Message(wait, rank, b"", None, [])  # for messages that are complete at once
        self._completed.done = True
        self._posted: list[Message] = []
        self._early: list[Message] = []
        self._partial_head = b""  # the start of a header
        self._arriving: Message | None = None
        self._target = memoryview(b"")  # memory to fill of the arriving message

    def send(self, key: bytes, tensor: Tensor) -> Message:
        """Start to send; raises OSError if the connection has ended."""
        memory = memory_of(tensor)
        head = HEAD.pack(key, len(memory))
        if not self.outgoing:
            count = self._write([head, memory])
            if count == len(head) + len(memory):
                return self._completed
            rest = [memoryview(head)[count:], memory[max(0, count - len(head)) :]]
        else:
            rest = [memoryview(head), memory]
        message = Message(self._wait, self.rank, head, tensor, rest)
        self.outgoing.append(message)
        return message

    def receive(self, key: bytes, tensor: Tensor) -> Message:
        """Receive the next message of `key` into `tensor`; at once, if it is here."""
        memory = memory_of(tensor)
        awaited = Message(self._wait, self.rank, HEAD.pack(key, len(memory)), tensor, [memory])
        for index, early in enumerate(self._early):
            if early.head[:KEY_BYTES] == key:
                del self._early[index]
                early.late_receive = awaited
                if early.done:
                    copy_early(early)
                return awaited
        self._posted.append(awaited)
        return awaited

    def write(self) -> None:
        """Write as much outgoing data as the kernel accepts now; raises OSError if the connection has ended."""
        while self.outgoing:
            message = self.outgoing[0]
            count = self._write(message.rest)
            while message.rest and count >= len(message.rest[0]):
                count -= len(message.rest.pop(0))
            if message.rest:
                message.rest[0] = message.rest[0][count:]
                return
            message.done = True
            self.outgoing.popleft()

    def _write(self, parts: Sequence[bytes | memoryview]) -> int:
        try:
            return self.connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def read(self) -> None:
        """Read arrived data, a long message directly to its tensor. BlockingIOError: nothing has arrived; other
        OSErrors: nothing ever will."""
        if self._arriving is not None:
            count = self.connection.recv_into(self._target, 0, socket.MSG_DONTWAIT)
            self._fill(self._arriving, unless_closed(count))
        else:
            data = self.connection.recv(BUFFER_BYTES, socket.MSG_DONTWAIT)
            unless_closed(len(data))
            self._dispatch(self._partial_head + data)

    def _dispatch(self, data: bytes) -> None:
        at, end = 0, len(data)
        while end - at >= HEAD.size:
            message = self._message_for(data[at : at + HEAD.size])
            at += HEAD.size
            target = message.rest[0]
            count = min(len(target), end - at)
            target[:count] = data[at : at + count]
            at += count
            self._arriving, self._target = message, target
            self._fill(message, count)
        self._partial_head = data[at:]

    def _fill(self, message: Message, count: int) -> None:
        """Count `count` more bytes of the arriving message."""
        if count < len(self._target):
            self._target = self._target[count:]
            return
        self._arriving, message.done = None, True
        if message.late_receive is not None:
            copy_early(message)

    def _message_for(self, head: bytes) -> Message:
        """Return the message that was posted for this header, or a new early one."""
        for index, awaited in enumerate(self._posted):
            if awaited.head == head:
                del self._posted[index]
                return awaited
            if awaited.head[:KEY_BYTES] == head[:KEY_BYTES]:
                raise wrong_size(awaited, head)
        memory = bytearray(HEAD.unpack(head)[1])
        early = Message(self._wait, self.rank, head, memory, [memoryview(memory)])
        self._early.append(early)
        return early


SOCKET_BYTES = 4 << 20
# How often a waiting process polls, yielding the core, before it sleeps: a core without work halts, and waking it costs
# more than a small message.
POLLS = 60
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class LinkError(RuntimeError):
    """The connection to a rank has ended, or a message timed out."""


class Transport:
    """This rank's connections, by the peer's rank; no wait is longer than `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        # Calls that have begun and are not awaited; each continues when called, and returns whether it is finished.
        self.background: list[Callable[[], bool]] = []
        self.groups = 0  # the number that use the connections
        self._streams: dict[int, Stream] = {}
        self._by_descriptor: dict[int, Stream] = {}
        self._poll = select.poll()
        self._blocked: set[int] = set()  # ranks with outgoing data that the kernel did not accept

    @property
    def ranks(self) -> set[int]:
        """Return the ranks with a connection."""
        return set(self._streams)

    def add(self, rank: int, connection: socket.socket) -> None:
        """Use this connection for `rank` from now on."""
        tune(connection)
        stream = self._streams[rank] = self._by_descriptor[connection.fileno()] = Stream(self.wait, rank, connection)
        self._poll.register(stream.connection, select.POLLIN)

    def send(self, peer: int, key: bytes, tensor: Tensor) -> Message:
        """Start to send the contiguous `tensor` to rank `peer`; raises LinkError."""
        stream = self._streams[peer]
        if stream.ended:
            raise ended_error(stream)
        try:
            message = stream.send(key, tensor)
        except OSError as error:
            self._mark_ended(stream, error)
            raise ended_error(stream) from None
        if not message.done:
            self._poll_writable(stream)
        return message

    def receive(self, peer: int, key: bytes, tensor: Tensor) -> Message:
        """Receive the next message of `key` from rank `peer` into the contiguous `tensor`; raises LinkError."""
        stream = self._streams[peer]
        try:
            return stream.receive(key, tensor)
        except OSError as error:
            self._mark_ended(stream, error)
            raise ended_error(stream) from None

    def wait(self, message: Message) -> None:
        """Move all messages until `message` is done; raises LinkError naming the rank."""
        stream = self._streams[message.peer]
        for _ in range(POLLS):
            if message.done or stream.ended:
                break
            self._progress(0.0)
            os.sched_yield()
        deadline = time.monotonic() + self.timeout_s
        while not message.done:
            if stream.ended:
                raise ended_error(stream)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LinkError(f"a message to or from rank {message.peer} was not complete in {self.timeout_s:g} s")
            self._progress(left_s)

    def _progress(self, timeout_s: float) -> None:
        """Read and write wherever possible now; if nowhere, wait until it is."""
        for descriptor, events in self._poll.poll(timeout_s * 1000):
            stream = self._by_descriptor[descriptor]
            try:
                if events & select.POLLOUT:
                    stream.write()
                    self._poll_writable(stream)
                if events & READABLE:
                    stream.read()
            except BlockingIOError:
                continue
            except OSError as error:
                self._mark_ended(stream, error)
        if self.background:
            self.background = [advance for advance in self.background if not advance()]

    def _poll_writable(self, stream: Stream) -> None:
        """Poll for writability only while there is outgoing data."""
        if bool(stream.outgoing) != (stream.rank in self._blocked):
            self._poll.modify(stream.connection, select.POLLIN | (select.POLLOUT if stream.outgoing else 0))
            self._blocked ^= {stream.rank}

    def _mark_ended(self, stream: Stream, error: OSError) -> None:
        stream.ended = error.strerror or str(error)
        self._blocked.discard(stream.rank)
        self._poll.unregister(stream.connection)

    def flush(self) -> None:
        """Send all outgoing data, for at most `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while self._blocked and time.monotonic() < deadline:
            self._progress(0.1)

    def leave(self) -> None:
        """Count one group less; with the last one, send all data and close the connections."""
        self.groups -= 1
        self.flush()
        if self.groups == 0:
            for stream in self._streams.values():
                stream.connection.close()
            self._streams.clear()
            self._by_descriptor.clear()


def ended_error(stream: Stream) -> LinkError:
    """Return the error for a connection that has ended."""
    return LinkError(f"the connection to rank {stream.rank} has ended: {stream.ended}")


def tune(connection: socket.socket) -> None:
    """Disable Nagle's delay, and enlarge the buffers."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)


# A group's messages on the connections that all groups of a process share, separated by the channel in their keys.
#
# `send` and `recv` are those of a process group, so every hand-written collective can use it by one argument:
# `Collective(group, carrier=channel)`.

KEY = struct.Struct("=8sq")


class Channel:
    """Messages between `ranks` (of the world, in group order); this process is number `rank`. `name` separates them
    from other groups' messages."""

    def __init__(self, transport: Transport, ranks: Sequence[int], rank: int, name: str) -> None:
        self.transport, self.ranks, self.rank = transport, list(ranks), rank
        self._name = hashlib.blake2b(name.encode(), digest_size=8).digest()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Message:
        """Start to send the one contiguous tensor to rank `peer` of the group."""
        return self.transport.send(self.ranks[peer], self._key(tag), tensors[0])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Message:
        """Receive the next message with this tag into the one contiguous tensor."""
        return self.transport.receive(self.ranks[peer], self._key(tag), tensors[0])

    def _key(self, tag: int) -> bytes:
        return KEY.pack(self._name, tag)
