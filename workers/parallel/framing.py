"""A message on a connection: a head, of its key and its length, and a tensor's own memory."""

import ctypes
import struct
from typing import Protocol

from torch import Tensor

KEY_BYTES = 16
# 64 B in all, so that both ends copy a tensor between addresses that are aligned alike: a third of a read's time.
HEAD = struct.Struct(f"={KEY_BYTES}sQ40x")
MEMORY = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
PYBUF_WRITE = 0x200  # of CPython's API: it may be written to


class Waits(Protocol):
    def wait(self, message: "Message", /) -> None: ...


class Message:
    """A tensor to or from rank `peer`, `done` once it may be changed again, or is there.

    `rest` is what the kernel has not taken yet, or the place of what is awaited. `heir` is a receive that was posted
    when this message had begun to come: it gets a copy. Who holds a message holds its memory.
    """

    __slots__ = ("_transport", "done", "head", "heir", "memory", "peer", "rest")

    def __init__(self, transport: Waits, peer: int, head: bytes, memory: object, rest: list[memoryview]) -> None:
        self._transport, self.peer, self.head, self.memory, self.rest = transport, peer, head, memory, rest
        self.done = False
        self.heir: Message | None = None

    def wait(self) -> None:
        """Return once it is done; raises RuntimeError where the connection has ended."""
        if not self.done:
            self._transport.wait(self)


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
