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
# Nothing here waits but `read` and `take`; who waits for what is the transport's.

BUFFER_BYTES = 4096  # of what is read before it is known whose it is: this much is copied once more

# How often who waits looks for a small message, and lets others have the core, before it sleeps: 0.12 ms where nobody
# else wants the core. One on which all sleep halts, and to wake it costs more than the message: without looks two ranks
# sum 64 B in 50 us, with them in 25 for half of the processors' time, four in 0.16 ms and in 0.10 to 0.13 for up to a
# third more.
LOOKS = 60
LOOKED_FOR_BYTES = 64 << 10  # of a larger one a part would be seen, and the rest would have to be waited for again


class Stream:
    """One connection, its socket blocking: what goes, what is awaited, and what came unasked."""

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
        self._head = bytearray(HEAD.size)  # of a message that is read to its place at once
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

    def take(self, key: bytes, tensor: Tensor) -> Message:
        """`receive`, but of a message that is the next to come and comes soon: done then, and nothing is posted."""
        if self._posted or self._early or self._left or self._coming is not None or self.ended:
            return self.receive(key, tensor)
        memory = memory_of(tensor)
        try:
            count = self._next(memory)
        except BlockingIOError:
            return self.receive(key, tensor)
        if count == HEAD.size + len(memory) and self._head == HEAD.pack(key, len(memory)):
            return self._over
        awaited = self.receive(key, tensor)
        self._came(awaited, count)
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

    def read(self, flags: int = 0, awaited: Message | None = None) -> None:
        """Take what has come; BlockingIOError: nothing has; another OSError: nothing ever will. If the next message is
        the one that is `awaited`, it comes to its place in one call, without a copy."""
        if self._coming is not None:
            count = self.connection.recv_into(self._place, 0, flags if awaited is None else socket.MSG_WAITALL)
            self._fill(self._coming, unless_closed(count))
        elif awaited is not None and not self._left and self._posted and self._posted[0] is awaited:
            self._came(awaited, self._next(awaited.rest[0]))
        else:
            data = self.connection.recv(BUFFER_BYTES, flags)
            unless_closed(len(data))
            self._sort(self._left + data)

    def _next(self, place: memoryview) -> int:
        """Read a head, and what follows it to `place`, where it mostly belongs."""
        parts: list[bytearray | memoryview] = [self._head, place]
        if len(place) <= LOOKED_FOR_BYTES:
            for _ in range(LOOKS):
                try:
                    return self.connection.recvmsg_into(parts, 0, socket.MSG_DONTWAIT)[0]
                except BlockingIOError:
                    os.sched_yield()
        # Until all of it is there: who waits here has nothing else to move, and is woken once.
        return self.connection.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]

    def _came(self, awaited: Message, count: int) -> None:
        """So many bytes, a head and what followed it to the place of what is `awaited`, the first of what is posted."""
        place = awaited.rest[0]
        if unless_closed(count) >= HEAD.size and self._head == awaited.head:
            del self._posted[0]
            self._coming, self._place = awaited, place
            self._fill(awaited, count - HEAD.size)
        else:
            self._sort(bytes(self._head[:count]) + bytes(place[: max(0, count - HEAD.size)]))

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
ALONE_S = 0.02  # that a wait looks at one connection before it looks at all
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
    """No waiting for more to send, large buffers, and a bound on each read."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, int(ALONE_S * 1e6)))


# A group's own messages on the connections that all groups of a process share: the channel in their keys.
#
# `send` and `recv` are those of a process group, so that every collective by hand goes over it by one argument:
# `Collective(group, carrier=channel)`.

KEY = struct.Struct("=8sq")
# Of a message that is received once it is waited for: what comes before its receive was posted is copied once more.
UNPOSTED_BYTES = 64 << 10


class Unposted:
    """A receive that is posted when it is waited for, or not at all where its message is the next to come."""

    __slots__ = ("_key", "_peer", "_tensor", "_transport")
    done = False

    def __init__(self, transport: Transport, peer: int, key: bytes, tensor: Tensor) -> None:
        self._transport, self._peer, self._key, self._tensor = transport, peer, key, tensor

    def wait(self) -> None:
        """Return when the message has come; raises LinkError naming the rank."""
        self._transport.take(self._peer, self._key, self._tensor)


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

    def recv_when_awaited(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Message | Unposted:
        """The same of a call that waits for each of its messages: a small one is not posted before."""
        if tensors[0].nbytes > UNPOSTED_BYTES:
            return self.recv(tensors, peer, tag)
        return Unposted(self.transport, self.ranks[peer], self._key(tag), tensors[0])

    def _key(self, tag: int) -> bytes:
        return KEY.pack(self._name, tag)
