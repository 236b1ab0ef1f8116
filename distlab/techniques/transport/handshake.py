"""Mutual authentication of a new connection: each end proves that it has the run's key before its bytes are used.

    dialler   MAGIC, its nonce
    listener  MAGIC, its nonce, its identity and proof
    dialler   its identity and proof
    listener  ACCEPTED

A proof is an HMAC-SHA256 over the end's role, the purpose of the port, both nonces and the end's identity, so a proof
from one connection is useless on another. Later bytes are neither signed nor encrypted: an attacker who can change
traffic can change that of an accepted connection.

Anybody may connect to a port. So a Listener reads from all unverified connections at once, at most MOST of them for
PROVE_S each, and the oldest is closed for the newest: silent connections block nobody.
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
ACCEPTED = b"+"
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
WHO = struct.Struct("!iQ")
PROOF_BYTES = WHO.size + 32
MAX_UNVERIFIED = 64  # unverified connections at once; a valid one is accepted within milliseconds
PROVE_S = 5.0
RETRY_S = 0.05
BACKLOG = 128
OnRejected = Callable[[str, tuple[str, int]], None]  # is called with the fault, and the address and port it came from


def ignore_rejected(fault: str, source: tuple[str, int]) -> None:
    """Ignore a rejected connection: the default where they are not counted."""


class Who(NamedTuple):
    """The process at one end: a rank, and a number that distinguishes its lives if a rank may come back."""

    rank: int
    life: int = 0


NOBODY = Who(-1)


class Unproven(ConnectionError):
    """The other end does not have the key, or did not prove it in time."""


class Closed(Unproven):
    """The other end closed the connection before anything was proven; it may have been busy."""


class Foreign(Unproven):
    """Another program listens there."""


def proof(key: bytes, end: bytes, purpose: str, nonces: bytes, who: Who) -> bytes:
    """Return this end's identity, and the proof of it."""
    message = WHO.pack(*who)
    return message + hmac.digest(key, end + nonces + message + purpose.encode(), "sha256")


def proven(key: bytes, end: bytes, purpose: str, nonces: bytes, message: bytes) -> Who:
    """Return the identity in `message`; raises Unproven if its proof does not match the key."""
    who = Who(*WHO.unpack_from(message))
    if not hmac.compare_digest(message, proof(key, end, purpose, nonces, who)):
        raise Unproven("it does not have the key of this run")
    return who


def prove(connection: socket.socket, key: bytes, purpose: str, me: Who, timeout_s: float) -> Who:
    """Authenticate as the dialler: return who listens, once both ends have proven themselves; raises OSError."""
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
    _read(connection, len(ACCEPTED), deadline)
    return listener


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        new = connection.recv(count - len(received))
        if not new:
            raise Closed("it closed the connection before it had proven the key")
        received += new
    return received


def dialled(
    ip: str, port: int, key: bytes, purpose: str, me: Who, deadline: float
) -> tuple[socket.socket, Who]:  # fmt: skip
    """Return a connection whose both ends are proven, and the other end's identity; raises OSError.

    A listener that closes the connection was busy, perhaps with strangers: it is dialled again until the deadline.
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


class Unverified:
    """A connection that has proven nothing yet."""

    def __init__(self, connection: socket.socket, source: tuple[str, int]) -> None:
        self.connection, self.source = connection, source
        self.received = self.nonces = b""
        self.deadline = time.monotonic() + PROVE_S

    def read(self) -> bool:
        """Read up to the end of the next expected message; return whether it is complete. Raises OSError."""
        wanted = PROOF_BYTES if self.nonces else HELLO_BYTES
        with suppress(BlockingIOError):
            new = self.connection.recv(wanted - len(self.received))
            if not new:
                raise Closed("it closed the connection before it had proven the key")
            self.received += new
        return len(self.received) == wanted


def listen(ip: str, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens at this address only."""
    return socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=BACKLOG)


class Listener:
    """A listening socket that accepts peers with the key; for one thread, whose `selector` may have other sockets."""

    def __init__(
        self, listening: socket.socket, selector: selectors.BaseSelector, key: bytes, purpose: str,
        me: Callable[[], Who] = lambda: NOBODY, on_rejected: OnRejected = ignore_rejected,
    ) -> None:  # fmt: skip
        listening.setblocking(False)  # the caller may have disconnected before it is accepted
        self._listening, self._selector, self._key, self._purpose = listening, selector, key, purpose
        self._me, self._on_rejected = me, on_rejected
        self._unverified: dict[socket.socket, Unverified] = {}
        selector.register(listening, selectors.EVENT_READ, self)

    def owns(self, key: selectors.SelectorKey) -> bool:
        """Return whether an event of the selector is for `step`."""
        return key.data is self or isinstance(key.data, Unverified)

    def sockets(self) -> list[socket.socket]:
        """Return all sockets that are open here."""
        return [self._listening, *self._unverified]

    def step(self, key: selectors.SelectorKey) -> tuple[Who, socket.socket] | None:
        """Process an event; return a connection once it is proven. It then belongs to the caller."""
        if not isinstance(key.data, Unverified):
            self._accept()
            return None
        peer = key.data
        try:
            if not peer.read():
                return None
            if not peer.nonces:
                self._answer(peer)
                return None
            who = proven(self._key, b"dialler", self._purpose, peer.nonces, peer.received)
            peer.connection.send(ACCEPTED)
        except OSError:
            # A peer that closes after this end's proof has another key; a silent one only probed the port.
            sent = peer.received or peer.nonces
            self._reject(peer, "with another key" if sent else "")
            return None
        self._forget(peer)
        return who, peer.connection

    def expire(self) -> None:
        """Reject connections that have taken too long."""
        now = time.monotonic()
        for peer in [peer for peer in self._unverified.values() if now > peer.deadline]:
            self._reject(peer, "that did not prove the key")

    def close(self) -> None:
        """Stop listening; all unverified connections are rejected."""
        for peer in list(self._unverified.values()):
            self._reject(peer, "")
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        try:
            connection, source = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # the caller has disconnected
            return
        except OSError:  # no descriptor is free: try again later
            time.sleep(RETRY_S)
            return
        connection.setblocking(False)
        peer = self._unverified[connection] = Unverified(connection, (str(source[0]), int(source[1])))
        self._selector.register(connection, selectors.EVENT_READ, peer)
        if len(self._unverified) > MAX_UNVERIFIED:
            self._reject(next(iter(self._unverified.values())), "that did not prove the key")

    def _answer(self, peer: Unverified) -> None:
        """Send this end's proof to a peer that has sent its nonce; raises OSError."""
        if not peer.received.startswith(MAGIC):
            raise Unproven("it does not speak this protocol")
        nonce = os.urandom(NONCE_BYTES)
        peer.nonces, peer.received = peer.received[len(MAGIC) :] + nonce, b""
        answer = MAGIC + nonce + proof(self._key, b"listener", self._purpose, peer.nonces, self._me())
        if peer.connection.send(answer) < len(answer):
            raise Unproven("it reads nothing")

    def _reject(self, peer: Unverified, fault: str) -> None:
        self._forget(peer)
        if fault:
            self._on_rejected(fault, peer.source)  # before the peer notices, so that it can read the new count
        peer.connection.close()

    def _forget(self, peer: Unverified) -> None:
        self._unverified.pop(peer.connection, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
