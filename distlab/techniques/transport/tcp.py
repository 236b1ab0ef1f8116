"""Messages over plain TCP, moved by the thread that waits: no thread of its own.

gloo hands each message on through three threads of a rank, which is 32 changes of context for an all_reduce of 256 B
among 4 ranks, 5 to 10 ms on two cores. Here a send writes at once what the kernel takes, and whoever waits for anything
moves all that is under way: both directions, all peers, all groups. So no order of sends and receives deadlocks, at
any size. What the kernel did not take lies still while nobody waits: it holds SOCKET_BYTES a connection and direction.

There is one connection between each two ranks, whatever groups they share; a key tells the groups' messages apart.
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

# A message on a connection: a head, of its key and its length, and a tensor's own memory.

KEY_BYTES = 16
# 64 B in all, so that both ends copy a tensor between addresses that are aligned alike: a third of a read's time.
HEAD = struct.Struct(f"={KEY_BYTES}sQ40x")
MEMORY = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
PYBUF_WRITE = 0x200  # of CPython's API: it may be written to
Wait = Callable[["Message"], None]  # returns once it is done


class Message:
    """A tensor to or from rank `peer`, `done` once it may be changed again, or is there.

    `rest` is what the kernel has not taken yet, or the place of what is awaited. `heir` is a receive that was posted
    when this message had begun to come: it gets a copy. Who holds a message holds its memory.
    """

    __slots__ = ("_wait", "done", "head", "heir", "memory", "peer", "rest")

    def __init__(self, wait: Wait, peer: int, head: bytes, memory: object, rest: list[memoryview]) -> None:
        self._wait, self.peer, self.head, self.memory, self.rest = wait, peer, head, memory, rest
        self.done = False
        self.heir: Message | None = None

    def wait(self) -> None:
        """Return once it is done; raises RuntimeError where the connection has ended."""
        if not self.done:
            self._wait(self)


def inherit(early: Message) -> None:
    """Copy what came early to where it is awaited; raises OSError where it has another size."""
    heir = early.heir
    assert heir is not None
    if heir.head != early.head:
        raise wrong_size(heir, early.head)
    heir.rest[0][:] = early.rest[0]
    heir.done = True


def unless_closed(count: int) -> int:
    """So many bytes were read; raises OSError where there were none, at the end of the connection."""
    if count == 0:
        raise ConnectionResetError("it was closed")
    return count


def wrong_size(awaited: Message, head: bytes) -> OSError:
    """What is raised where two ranks do not agree how long a message is."""
    return ConnectionAbortedError(f"it sent {HEAD.unpack(head)[1]} bytes where {len(awaited.rest[0])} are awaited")


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor. Not by `tensor.numpy()`, after which its storage could not be resized again:
    ZeRO-3 frees by that. Nor by an array of ctypes, which makes a type for each length: 20 us."""
    memory: memoryview = MEMORY(tensor.data_ptr(), tensor.numel() * tensor.element_size(), PYBUF_WRITE)
    return memory


# The connection to one rank as a stream of messages.
#
# A message goes from the tensor's own memory, head and bytes in one call, and arrives in the tensor that was posted
# for its key. What comes before its receive was posted is kept aside, so that what lies behind it can be read.
# Nothing here waits; who waits for what is the transport's.

BUFFER_BYTES = 4096  # of what is read before it is known whose it is: this much is copied once more


class Stream:
    """One connection: what goes, what is awaited, and what came unasked."""

    def __init__(self, wait: Wait, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.ended = ""  # why
        self.going: deque[Message] = deque()
        self._wait = wait
        self._over = Message(wait, rank, b"", None, [])  # what the kernel took at once, or had
        self._over.done = True
        self._posted: list[Message] = []
        self._early: list[Message] = []
        self._left = b""  # the beginning of a head
        self._coming: Message | None = None
        self._place = memoryview(b"")  # of the message that is coming, what is still to be filled

    def send(self, key: bytes, tensor: Tensor) -> Message:
        """Begin to send; raises OSError where the connection has ended."""
        memory = memory_of(tensor)
        head = HEAD.pack(key, len(memory))
        if not self.going:
            count = self._write([head, memory])
            if count == len(head) + len(memory):
                return self._over
            rest = [memoryview(head)[count:], memory[max(0, count - len(head)) :]]
        else:
            rest = [memoryview(head), memory]
        message = Message(self._wait, self.rank, head, tensor, rest)
        self.going.append(message)
        return message

    def receive(self, key: bytes, tensor: Tensor) -> Message:
        """Let the next message of `key` come to `tensor`; at once, if it is here."""
        memory = memory_of(tensor)
        awaited = Message(self._wait, self.rank, HEAD.pack(key, len(memory)), tensor, [memory])
        for index, early in enumerate(self._early):
            if early.head[:KEY_BYTES] == key:
                del self._early[index]
                early.heir = awaited
                if early.done:
                    inherit(early)
                return awaited
        self._posted.append(awaited)
        return awaited

    def write(self) -> None:
        """Give the kernel what it takes now of what is going; raises OSError where the connection has ended."""
        while self.going:
            message = self.going[0]
            count = self._write(message.rest)
            while message.rest and count >= len(message.rest[0]):
                count -= len(message.rest.pop(0))
            if message.rest:
                message.rest[0] = message.rest[0][count:]
                return
            message.done = True
            self.going.popleft()

    def _write(self, parts: Sequence[bytes | memoryview]) -> int:
        try:
            return self.connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def read(self) -> None:
        """Take what has come, a long message to its place; BlockingIOError: nothing has; another OSError: nothing ever
        will."""
        if self._coming is not None:
            count = self.connection.recv_into(self._place, 0, socket.MSG_DONTWAIT)
            self._fill(self._coming, unless_closed(count))
        else:
            data = self.connection.recv(BUFFER_BYTES, socket.MSG_DONTWAIT)
            unless_closed(len(data))
            self._sort(self._left + data)

    def _sort(self, data: bytes) -> None:
        at, end = 0, len(data)
        while end - at >= HEAD.size:
            message = self._whose(data[at : at + HEAD.size])
            at += HEAD.size
            place = message.rest[0]
            here = min(len(place), end - at)
            place[:here] = data[at : at + here]
            at += here
            self._coming, self._place = message, place
            self._fill(message, here)
        self._left = data[at:]

    def _fill(self, message: Message, count: int) -> None:
        """`count` bytes more of the message that is coming have come."""
        if count < len(self._place):
            self._place = self._place[count:]
            return
        self._coming, message.done = None, True
        if message.heir is not None:
            inherit(message)

    def _whose(self, head: bytes) -> Message:
        """The message that was posted for this head, or a new one that is kept aside."""
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
# How often who waits looks at once, and lets others have the core, before it sleeps: a core on which all sleep halts,
# and to wake it costs more than a small message.
LOOKS = 60
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class LinkError(RuntimeError):
    """The connection to a rank has ended, or nothing came over it in time."""


class Transport:
    """This rank's connections, by the rank at their other end; no wait is longer than `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        # What was begun and not awaited: goes on as far as messages have come; whether it is at its end.
        self.background: list[Callable[[], bool]] = []
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
        stream = self._streams[rank] = self._by_descriptor[connection.fileno()] = Stream(self.wait, rank, connection)
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

    def wait(self, message: Message) -> None:
        """Move what is under way until `message` is done; raises LinkError naming the rank."""
        stream = self._streams[message.peer]
        for _ in range(LOOKS):
            if message.done or stream.ended:
                break
            self._move(0.0)
            os.sched_yield()
        deadline = time.monotonic() + self.timeout_s
        while not message.done:
            if stream.ended:
                raise lost(stream)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LinkError(f"nothing came of the message with rank {message.peer} in {self.timeout_s:g} s")
            self._move(left_s)

    def _move(self, timeout_s: float) -> None:
        """Read and write wherever it can be done now; if nowhere, wait until it can."""
        for descriptor, events in self._poll.poll(timeout_s * 1000):
            stream = self._by_descriptor[descriptor]
            try:
                if events & select.POLLOUT:
                    stream.write()
                    self._ask(stream)
                if events & READABLE:
                    stream.read()
            except BlockingIOError:
                continue
            except OSError as error:
                self._lose(stream, error)
        if self.background:
            self.background = [advance for advance in self.background if not advance()]

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
    """No waiting for more to send, and large buffers."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)


# A group's own messages on the connections that all groups of a process share: the channel in their keys.
#
# `send` and `recv` are those of a process group, so that every collective by hand goes over it by one argument:
# `Collective(group, carrier=channel)`.

KEY = struct.Struct("=8sq")


class Channel:
    """Messages between `ranks` (of the world, in the order of the group), of which this is number `rank`; another
    group's are told from them by `name`."""

    def __init__(self, transport: Transport, ranks: Sequence[int], rank: int, name: str) -> None:
        self.transport, self.ranks, self.rank = transport, list(ranks), rank
        self._name = hashlib.blake2b(name.encode(), digest_size=8).digest()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Message:
        """Begin to send the one contiguous tensor to rank `peer` of the group."""
        return self.transport.send(self.ranks[peer], self._key(tag), tensors[0])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Message:
        """Let the next one with this tag come to the one contiguous tensor."""
        return self.transport.receive(self.ranks[peer], self._key(tag), tensors[0])

    def _key(self, tag: int) -> bytes:
        return KEY.pack(self._name, tag)
