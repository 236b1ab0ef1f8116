"""The connection to one rank as a stream of messages.

A message goes from the tensor's own memory, head and bytes in one call, and arrives in the tensor that was posted for
its key. What comes before its receive was posted is kept aside, so that what lies behind it can be read. Nothing here
waits but `read` and `take`; who waits for what is the transport's.
"""

import os
import socket
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from workers.parallel.framing import HEAD, KEY_BYTES, Message, Waits, inherit, memory_of, unless_closed, wrong_size

BUFFER_BYTES = 4096  # of what is read before it is known whose it is: this much is copied once more

# How often who waits looks for a small message, and lets others have the core, before it sleeps: 0.12 ms where nobody
# else wants the core. One on which all sleep halts, and to wake it costs more than the message: without looks two ranks
# sum 64 B in 50 us, with them in 25 for half of the processors' time, four in 0.16 ms and in 0.10 to 0.13 for up to a
# third more (`python -m benchmarks.transport 2`, and 4).
LOOKS = 60
LOOKED_FOR_BYTES = 64 << 10  # of a larger one a part would be seen, and the rest would have to be waited for again


class Stream:
    """One connection, its socket blocking: what goes, what is awaited, and what came unasked."""

    def __init__(self, transport: Waits, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.ended = ""  # why
        self.going: deque[Message] = deque()
        self._transport = transport
        self._over = Message(transport, rank, b"", None, [])  # what the kernel took at once, or had
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
        message = Message(self._transport, self.rank, head, tensor, rest)
        self.going.append(message)
        return message

    def receive(self, key: bytes, tensor: Tensor) -> Message:
        """Let the next message of `key` come to `tensor`; at once, if it is here."""
        memory = memory_of(tensor)
        awaited = Message(self._transport, self.rank, HEAD.pack(key, len(memory)), tensor, [memory])
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
        """Lay each message in `data` where it belongs."""
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
        early = Message(self._transport, self.rank, head, memory, [memoryview(memory)])
        self._early.append(early)
        return early
