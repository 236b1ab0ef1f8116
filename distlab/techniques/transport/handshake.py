"""Both ends of a new connection prove that they have the key, before either believes a byte that the other has sent.

    dialler   MAGIC, its nonce
    listener  MAGIC, its nonce, who it is, the proof of it
    dialler   who it is, the proof of it
    listener  LET_IN

A proof is an HMAC-SHA256 over which end it comes from, what the port is for, both nonces and who that end is: what was
heard on another connection proves nothing on this one. What follows is neither sealed nor hidden: who can change bytes
on the wire can change those of a connection that stands.

Anybody may connect to a port. So a Door reads from all who have connected at once, MOST of them for PROVE_S each at
most, and the oldest gives way to the newest: silent connections hold up nobody.
"""

import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

MAGIC, NONCE_BYTES = b"rkh1", 16
LET_IN = b"+"
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
WHO = struct.Struct("!iQ")
PROOF_BYTES = WHO.size + 32
MOST = 64  # unproven connections at once; one that proves itself is through in some milliseconds
PROVE_S = 5.0
FULL_S = 0.05
BACKLOG = 128
TurnedAway = Callable[[str, tuple[str, int]], None]  # hears what was wrong, and from which address and port it came


def unheeded(fault: str, source: tuple[str, int]) -> None:
    """What becomes of strangers where nobody counts them."""


class Who(NamedTuple):
    """The process at one end: a rank, and a number of its own where a rank may come back."""

    rank: int
    life: int = 0


NOBODY = Who(-1)


class Unproven(ConnectionError):
    """The other end does not have the key, or did not say so in time."""


class Closed(Unproven):
    """The other end hung up before anything was proven: it may have had too much to do."""


class Foreign(Unproven):
    """Another program listens there."""


def proof(key: bytes, end: bytes, purpose: str, nonces: bytes, who: Who) -> bytes:
    """Who this end is, and the proof of it."""
    said = WHO.pack(*who)
    return said + hmac.digest(key, end + nonces + said + purpose.encode(), "sha256")


def proven(key: bytes, end: bytes, purpose: str, nonces: bytes, said: bytes) -> Who:
    """Who says this; raises Unproven where it does not have the key."""
    who = Who(*WHO.unpack_from(said))
    if not hmac.compare_digest(said, proof(key, end, purpose, nonces, who)):
        raise Unproven("it does not have the key of this run")
    return who


def prove(connection: socket.socket, key: bytes, purpose: str, me: Who, timeout_s: float) -> Who:
    """As the one who has dialled: who listens there, once both ends have proven themselves; raises OSError."""
    deadline = time.monotonic() + timeout_s
    nonce = os.urandom(NONCE_BYTES)
    connection.settimeout(max(0.01, timeout_s))
    connection.sendall(MAGIC + nonce)
    if _read(connection, len(MAGIC), deadline) != MAGIC:
        raise Foreign("it does not speak this protocol")
    answer = _read(connection, NONCE_BYTES + PROOF_BYTES, deadline)
    nonces = nonce + answer[:NONCE_BYTES]
    listener = proven(key, b"listener", purpose, nonces, answer[NONCE_BYTES:])
    connection.sendall(proof(key, b"dialler", purpose, nonces, me))
    _read(connection, len(LET_IN), deadline)
    return listener


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        new = connection.recv(count - len(received))
        if not new:
            raise Closed("it hung up before anything was proven")
        received += new
    return received


def dialled(
    ip: str, port: int, key: bytes, purpose: str, me: Who, deadline: float
) -> tuple[socket.socket, Who]:  # fmt: skip
    """A connection whose both ends are proven, and who is at the other one; raises OSError.

    A listener that hangs up was busy with others, strangers perhaps: it is dialled again until the deadline.
    """
    while True:
        connection = socket.create_connection((ip, port), max(0.01, deadline - time.monotonic()))
        try:
            return connection, prove(connection, key, purpose, me, deadline - time.monotonic())
        except (Closed, ConnectionResetError, BrokenPipeError):
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        except OSError:
            connection.close()
            raise


class Guest:
    """A connection that has proven nothing yet."""

    def __init__(self, connection: socket.socket, source: tuple[str, int]) -> None:
        self.connection, self.source = connection, source
        self.received = self.nonces = b""
        self.deadline = time.monotonic() + PROVE_S

    def read(self) -> bool:
        """Whether all of what is awaited next has come, and not a byte of what follows it; raises OSError."""
        wanted = PROOF_BYTES if self.nonces else HELLO_BYTES
        with suppress(BlockingIOError):
            new = self.connection.recv(wanted - len(self.received))
            if not new:
                raise Closed("hung up before it had proven anything")
            self.received += new
        return len(self.received) == wanted


def listen(ip: str, port: int = 0) -> socket.socket:
    """A TCP socket that listens at this address alone."""
    return socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=BACKLOG)


class Door:
    """A socket that listens, for those who have the key; used by one thread, whose `selector` also has its own."""

    def __init__(
        self, listening: socket.socket, selector: selectors.BaseSelector, key: bytes, purpose: str,
        me: Callable[[], Who] = lambda: NOBODY, turned_away: TurnedAway = unheeded,
    ) -> None:  # fmt: skip
        listening.setblocking(False)  # whoever called may have hung up before it is accepted
        self._listening, self._selector, self._key, self._purpose = listening, selector, key, purpose
        self._me, self._turned_away = me, turned_away
        self._guests: dict[socket.socket, Guest] = {}
        selector.register(listening, selectors.EVENT_READ, self)

    def owns(self, key: selectors.SelectorKey) -> bool:
        """Whether an event of the selector is for `step`."""
        return key.data is self or isinstance(key.data, Guest)

    def sockets(self) -> list[socket.socket]:
        """All that are open here."""
        return [self._listening, *self._guests]

    def step(self, key: selectors.SelectorKey) -> tuple[Who, socket.socket] | None:
        """Go on with what has come; a connection once it is proven, which is its taker's from then on."""
        if not isinstance(key.data, Guest):
            self._let_in()
            return None
        guest = key.data
        try:
            if not guest.read():
                return None
            if not guest.nonces:
                self._answer(guest)
                return None
            who = proven(self._key, b"dialler", self._purpose, guest.nonces, guest.received)
            guest.connection.send(LET_IN)
        except OSError:
            # One that hangs up at this end's proof has another key; one without a word only looked who listens.
            said = guest.received or guest.nonces
            self._send_away(guest, "whose ends do not both have the key" if said else "")
            return None
        self._forget(guest)
        return who, guest.connection

    def expire(self) -> None:
        """Send away who has taken too long."""
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if now > guest.deadline]:
            self._send_away(guest, "that proves nothing")

    def close(self) -> None:
        """Listen no more; whoever has proven nothing until now is sent away."""
        for guest in list(self._guests.values()):
            self._send_away(guest, "")
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._listening)
        self._listening.close()

    def _let_in(self) -> None:
        try:
            connection, source = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # it has hung up
            return
        except OSError:  # no descriptor is left: its turn comes again
            time.sleep(FULL_S)
            return
        connection.setblocking(False)
        guest = self._guests[connection] = Guest(connection, (str(source[0]), int(source[1])))
        self._selector.register(connection, selectors.EVENT_READ, guest)
        if len(self._guests) > MOST:
            self._send_away(next(iter(self._guests.values())), "that proves nothing")

    def _answer(self, guest: Guest) -> None:
        """Prove this end to one that has greeted; raises OSError."""
        if not guest.received.startswith(MAGIC):
            raise Unproven("it does not speak this protocol")
        nonce = os.urandom(NONCE_BYTES)
        guest.nonces, guest.received = guest.received[len(MAGIC) :] + nonce, b""
        answer = MAGIC + nonce + proof(self._key, b"listener", self._purpose, guest.nonces, self._me())
        if guest.connection.send(answer) < len(answer):
            raise Unproven("it does not read")

    def _send_away(self, guest: Guest, fault: str) -> None:
        self._forget(guest)
        if fault:
            self._turned_away(fault, guest.source)  # before it sees that it was: whoever reads the count next finds it
        guest.connection.close()

    def _forget(self, guest: Guest) -> None:
        self._guests.pop(guest.connection, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(guest.connection)
