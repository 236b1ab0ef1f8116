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

    def take(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Return when the next one with this tag has come to the contiguous `tensor`."""
        self.transport.take(self.ranks[peer], self._key(tag), tensor)

    def _key(self, tag: int) -> bytes:
        return KEY.pack(self._name, tag)
