"""One line to another rank: a TCP connection that carries words, JSON a line each, once both ends have proven the key.

A process names itself by rank and *life*, a number of its own: a rank that comes back is another process. Words are
those of a process of the run, and still read field by field: a defective one ends nobody's thread.
"""

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from workers.parallel.handshake import NOBODY, Who

Message = dict[str, Any]

MAX_BYTES = 1 << 20  # of one message


class Address(NamedTuple):
    """Where a rank listens: for lines, and as the host of a store."""

    ip: str
    port: int
    store_port: int


class Line:
    """One connection, to the process that `who` names once it is proven."""

    def __init__(self, connection: socket.socket, who: Who = NOBODY, *, dialled: bool = False) -> None:
        self.connection, self.who, self.received = connection, who, b""
        self.dialled = dialled  # by this rank

    def read(self) -> list[Any]:
        """What has come, None for what is no JSON; raises OSError at its end."""
        with suppress(BlockingIOError):
            new = self.connection.recv(1 << 16)
            if not new:
                raise ConnectionResetError
            self.received += new
        if len(self.received) > MAX_BYTES:
            raise ConnectionResetError
        *whole, self.received = self.received.split(b"\n")
        return [parsed(text) for text in whole]


def parsed(text: bytes) -> Any:
    """JSON, or None where it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def whole(value: Any) -> bool:
    """An integer that any number of ours may be; True and False are none."""
    return type(value) is int and -(2**63) <= value < 2**64


def members(value: Any) -> bool:
    """Ranks with their lives."""
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and all(map(whole, each)) for each in value
    )


def opened(value: Any) -> bool:
    """An address, as JSON has it."""
    return (
        isinstance(value, list)
        and len(value) == len(Address._fields)
        and isinstance(value[0], str)
        and all(type(port) is int and 0 <= port < 1 << 16 for port in value[1:])
    )


FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "ask": {"as": lambda value: isinstance(value, str)},
    "call": {"call": whole, "why": lambda value: isinstance(value, str)},
    "here": {"call": whole, "number": whole, "members": members, "report": lambda value: isinstance(value, dict)},
    "view": {"number": whole, "members": members, "plan": lambda value: isinstance(value, dict)},
    "done": {"number": whole},
    "left": {"number": whole},
}
MEMBER = {"rank": int, "host": str, "ip": str, "udp_port": int, "pid": int}
OF_ONE_BACK: dict[str, Callable[[Any], bool]] = {
    "opened": opened,
    "member": lambda value: isinstance(value, dict) and {name: type(each) for name, each in value.items()} == MEMBER,
}


def is_right(message: Any) -> bool:
    """Whether a message has what who reads it on the thread of the lines takes from it."""
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return False
    fields = FIELDS.get(message["kind"], {})
    if message["kind"] == "ask" and "opened" in message:
        fields = fields | OF_ONE_BACK
    return all(name in message and shape(message[name]) for name, shape in fields.items())


def written(message: Message) -> bytes:
    """A message as it goes over a line."""
    return json.dumps(message).encode() + b"\n"


def book_of(entries: Mapping[int, Iterable[Any]]) -> dict[int, Address]:
    """Addresses by rank, as they came over JSON."""
    return {int(rank): Address(*entry) for rank, entry in entries.items()}
