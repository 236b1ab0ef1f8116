"""A group's own messages on the connections that all groups of a process share: the channel in their keys.

`send` and `recv` are those of a process group, so that every collective by hand goes over it by one argument:
`Collective(group, carrier=channel)`.
"""

import hashlib
import struct
from collections.abc import Sequence

from torch import Tensor

from workers.parallel.framing import Message
from workers.parallel.transport import Transport

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
