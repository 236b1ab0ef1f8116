"""A store that only ranks of the run can access: torch's process groups meet in it, and the lab exchanges data.

It is a `dist.Store` written in Python: gloo and NCCL call it from C++ for every set, get, wait, check and add
(tests/techniques/transport/test_store.py). store_server.py hosts it; both ends prove the key first (handshake.py), so a
stranger that finds the port can neither list, read nor write keys.
"""

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch.distributed as dist

from distlab.techniques.transport.handshake import NOBODY, OnRejected, dialled, ignore_rejected, listen
from distlab.techniques.transport.store_server import (
    READ_BYTES,
    Add,
    Answer,
    Check,
    CompareSet,
    Count,
    Delete,
    Get,
    Set,
    StoreRequest,
    StoreServer,
    Wait,
    framed,
    pop_frames,
)

LATE_S = 2.0  # extra time beyond a wait's timeout, for a paused host to answer
ANSWERS = msgspec.msgpack.Decoder(Answer)


class KeyedStore(dist.Store):
    """A client of the store at `ip`:`port`; the constructor raises OSError if it cannot be reached within `timeout_s`.

    Every call raises RuntimeError after its timeout, by default `timeout_s`, or once the host has closed. `purpose` is
    that of the server's port.
    """

    def __init__(self, ip: str, port: int, key: bytes, timeout_s: float, purpose: str = "store") -> None:
        super().__init__()
        self.ip, self.port, self._key, self._purpose = ip, port, key, purpose
        super().set_timeout(timedelta(seconds=timeout_s))
        self._connection, _ = dialled(ip, port, key, purpose, NOBODY, time.monotonic() + timeout_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received, self._number = bytearray(), 0
        self._answers: dict[int, bytes | None] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._request(Set(0, key.encode(), to_bytes(value)))

    def get(self, key: str) -> bytes:
        return self._request(Get(0, key.encode(), self._timeout_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        bound_s = self._timeout_s if timeout is None else max(0.001, timeout.total_seconds())
        self._request(Wait(0, [key.encode() for key in keys], bound_s), bound_s)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request(Check(0, [key.encode() for key in keys])))

    def add(self, key: str, value: int) -> int:
        return int(self._request(Add(0, key.encode(), value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._request(CompareSet(0, key.encode(), to_bytes(expected_value), to_bytes(desired_value)))

    def delete_key(self, key: str) -> bool:
        return bool(self._request(Delete(0, key.encode())))

    def num_keys(self) -> int:
        return int(self._request(Count(0)))

    def clone(self) -> "KeyedStore":
        """Return another connection to the same store, so that a wait on one does not block the other."""
        return KeyedStore(self.ip, self.port, self._key, self._timeout_s, self._purpose)

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set  # noqa: N815  as C++ calls them

    def close(self) -> None:
        self._connection.close()

    @property
    def _timeout_s(self) -> float:
        """Return the timeout from `set_timeout`, called on this or, in C++, on a PrefixStore of it."""
        bound: timedelta = self.timeout  # type: ignore[attr-defined]
        return max(0.001, bound.total_seconds())

    def _request(self, request: StoreRequest, bound_s: float | None = None) -> bytes:
        bound_s = self._timeout_s if bound_s is None else bound_s
        with self._lock:
            self._number += 1
            request.number = self._number
            try:
                self._connection.settimeout(bound_s + LATE_S)
                self._connection.sendall(framed(request))
                value = self._answer(self._number, time.monotonic() + bound_s + LATE_S)
            except (OSError, ValueError) as error:
                self._connection.close()  # half a request may have been sent
                raise dist.DistNetworkError(f"the store at {self.ip}:{self.port} is unreachable: {error}") from None
        if value is None:
            raise dist.DistStoreError(f"wait timeout after {bound_s:g} s{keys_of(request)}")
        return value

    def _answer(self, number: int, deadline: float) -> bytes | None:
        """Return the answer to request `number`; raises OSError.

        A paused host sends nothing: the request times out, and its late answer is skipped.
        """
        while number not in self._answers:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                new = self._connection.recv(READ_BYTES)
            except TimeoutError:
                return None
            if not new:
                raise ConnectionResetError("it was closed")
            self._received += new
            found = [ANSWERS.decode(frame) for frame in pop_frames(self._received)]
            self._answers = {answer.number: answer.value for answer in found if answer.number >= number}
        return self._answers.pop(number)


class HostedStore(KeyedStore):
    """The store in its host process, at `listening`: a socket, or the address to open one at."""

    def __init__(
        self, listening: socket.socket | str, key: bytes, timeout_s: float, on_rejected: OnRejected = ignore_rejected
    ) -> None:
        opened = listen(listening) if isinstance(listening, str) else listening
        ip = reachable_ip(opened)
        self.host = StoreServer(opened, key, on_rejected)
        super().__init__(ip, self.host.port, key, timeout_s)

    def close(self) -> None:
        """Close the store for all."""
        super().close()
        self.host.close()


class Prefixed(dist.PrefixStore):
    """The keys of `store` with `prefix`; torch's own keeps only the C++ half alive, and would call a freed object."""

    def __init__(self, prefix: str, store: dist.Store) -> None:
        super().__init__(prefix, store)
        self.wrapped = store


def reachable_ip(listening: socket.socket) -> str:
    """Return an address of this machine at which the socket is reached."""
    ip = str(listening.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ip, ip)


def keys_of(request: StoreRequest) -> str:
    """Return the keys of a timed-out request, to append to a message."""
    keys = request.keys if isinstance(request, Wait | Check) else [getattr(request, "key", b"")]
    return f", keys: {', '.join(key.decode(errors='replace') for key in keys)}"


def to_bytes(value: str | bytes) -> bytes:
    """Return bytes for a value that C++ passes as bytes and Python mostly as text."""
    return value.encode() if isinstance(value, str) else bytes(value)
