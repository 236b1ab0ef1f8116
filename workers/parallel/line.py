"""One line to another rank: a TCP connection that carries words, JSON a line each, after a greeting of both ends.

A process names itself by rank and *life*, a number of its own: a rank that comes back is another process. Who does not
know the run's secret is not listened to.
"""

import hmac
import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

Message = dict[str, Any]

MAX_BYTES = 1 << 20  # of one message


class Address(NamedTuple):
    """Where a rank listens: for lines, and as the host of a store."""

    ip: str
    port: int
    store_port: int


class Line:
    """One connection, once its greeting was heard."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.received = connection, b""
        self.rank: int | None = None
        self.life = 0
        self.dialled = False  # by this rank

    def read(self) -> list[Message]:
        """What has come; raises OSError at its end."""
        with suppress(BlockingIOError):
            new = self.connection.recv(1 << 16)
            if not new:
                raise ConnectionResetError
            self.received += new
        if len(self.received) > MAX_BYTES:
            raise ConnectionResetError
        *whole, self.received = self.received.split(b"\n")
        return [message for message in map(parsed, whole) if isinstance(message, dict)]


def first_line(connection: socket.socket) -> bytes:
    """The greeting, and not a byte of what follows it; raises OSError."""
    received = b""
    while not received.endswith(b"\n"):
        new = connection.recv(1)
        if not new or len(received) > MAX_BYTES:
            raise ConnectionResetError
        received += new
    return received


def parsed(text: bytes) -> Any:
    """JSON, or None where it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def written(message: Message) -> bytes:
    """A message as it goes over a line."""
    return json.dumps(message).encode() + b"\n"


class Greeting:
    """How the rank `rank` says who it is, and finds out who others are."""

    def __init__(self, rank: int, secret: str) -> None:
        self.rank, self._secret = rank, secret.encode()

    def words(self, life: int, to: int) -> Message:
        """What `to` is greeted with."""
        return {"rank": self.rank, "life": life, "proof": self._proof(f"{self.rank} {life} {to}")}

    def heard(self, line: Line, message: Any) -> bool:
        """Take down who is at the other end, if it knows the secret."""
        if not isinstance(message, dict):
            return False
        rank, life = message.get("rank"), message.get("life")
        if not hmac.compare_digest(self._proof(f"{rank} {life} {self.rank}"), str(message.get("proof"))):
            return False
        line.rank, line.life = int(str(rank)), int(str(life))
        return True

    def _proof(self, words: str) -> str:
        return hmac.new(self._secret, words.encode(), "sha256").hexdigest()


def book_of(entries: Mapping[int, Iterable[Any]]) -> dict[int, Address]:
    """Addresses by rank, as they came over JSON."""
    return {int(rank): Address(*entry) for rank, entry in entries.items()}
