"""A store that only ranks of the run can read and write: what torch's process groups meet in, and the lab's exchanges.

A `dist.Store` written in Python: gloo and NCCL call it from C++ for every set, get, wait, check and add
(tests/workers/parallel/test_store.py). Who hosts it is store_host.py; both ends prove the key first (handshake.py), so
a stranger that finds the port can neither list nor read nor write a key.
"""

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from workers.parallel.handshake import NOBODY, TurnedAway, dialled, listen, unheeded
from workers.parallel.store_host import (
    ADD,
    CHECK,
    COMPARE_SET,
    COUNT,
    DELETE,
    FRAME,
    GET,
    READ_BYTES,
    SET,
    TIMED_OUT,
    WAIT,
    StoreHost,
    frames_of,
    packed,
)

LATE_S = 2.0  # beyond a wait's own bound, for a host that is paused to answer


class KeyedStore(dist.Store):
    """The store hosted at `ip`:`port`; the constructor raises OSError where it cannot be reached in `timeout_s`.

    Every call raises RuntimeError after its bound, by default `timeout_s`, or once the host is gone.
    """

    def __init__(self, ip: str, port: int, key: bytes, timeout_s: float) -> None:
        super().__init__()
        self.ip, self.port, self._key = ip, port, key
        super().set_timeout(timedelta(seconds=timeout_s))
        self._connection, _ = dialled(ip, port, key, "store", NOBODY, time.monotonic() + timeout_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received, self._number = bytearray(), 0
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(SET, [key.encode(), in_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._ask(GET, [key.encode()])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(WAIT, [key.encode() for key in keys], timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(CHECK, [key.encode() for key in keys]))

    def add(self, key: str, value: int) -> int:
        return int(self._ask(ADD, [key.encode(), str(value).encode()]))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(COMPARE_SET, [key.encode(), in_bytes(expected_value), in_bytes(desired_value)])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(DELETE, [key.encode()]))

    def num_keys(self) -> int:
        return int(self._ask(COUNT, []))

    def clone(self) -> "KeyedStore":
        """Another connection to the same store: a wait on one holds up none on the other."""
        return KeyedStore(self.ip, self.port, self._key, self._timeout_s)

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set  # noqa: N815  as C++ calls them

    def close(self) -> None:
        self._connection.close()

    @property
    def _timeout_s(self) -> float:
        """What `set_timeout` has set, called on this or, in C++, on a PrefixStore of it."""
        bound: timedelta = self.timeout  # type: ignore[attr-defined]
        return bound.total_seconds()

    def _ask(self, op: int, fields: Sequence[bytes], timeout: timedelta | None = None) -> bytes:
        """The answer of the host."""
        bound_s = max(0.001, self._timeout_s if timeout is None else timeout.total_seconds())
        request = packed(op, min(int(bound_s * 1000) or 1, 2**32 - 1), fields)
        with self._lock:
            self._number += 1
            try:
                self._connection.settimeout(bound_s + LATE_S)
                self._connection.sendall(FRAME.pack(self._number, len(request)) + request)
                answer = self._answer(self._number, time.monotonic() + bound_s + LATE_S)
            except OSError as error:
                self._connection.close()  # half a request may have gone
                raise dist.DistNetworkError(f"the store of {self.ip}:{self.port} is gone: {error}") from None
        if answer[:1] == TIMED_OUT:
            keys = ", ".join(key.decode(errors="replace") for key in fields)
            raise dist.DistStoreError(f"wait timeout after {bound_s:g} s, keys: {keys}")
        return answer[1:]

    def _answer(self, number: int, deadline: float) -> bytes:
        """That to request `number`; raises OSError.

        A host that is paused says nothing: this request has timed out, and what is said to it later is passed over.
        """
        while True:
            try:
                found = dict(frames_of(self._received))
            except ValueError as error:
                raise ConnectionAbortedError(str(error)) from None
            if number in found:
                return found[number]
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                new = self._connection.recv(READ_BYTES)
            except TimeoutError:
                return TIMED_OUT
            if not new:
                raise ConnectionResetError("it was closed")
            self._received += new


class HostedStore(KeyedStore):
    """The store in the process that hosts it, at `listening`, a socket or the address to open one at."""

    def __init__(
        self, listening: socket.socket | str, key: bytes, timeout_s: float, turned_away: TurnedAway = unheeded
    ) -> None:
        opened = listen(listening) if isinstance(listening, str) else listening
        ip = reachable(opened)
        self.host = StoreHost(opened, key, turned_away)
        super().__init__(ip, self.host.port, key, timeout_s)

    def close(self) -> None:
        """End it for all."""
        super().close()
        self.host.close()


class Prefixed(dist.PrefixStore):
    """The keys of `store` that begin with `prefix`; torch's own holds the C++ half alone, and calls what is gone."""

    def __init__(self, prefix: str, store: dist.Store) -> None:
        super().__init__(prefix, store)
        self.whole = store


def reachable(listening: socket.socket) -> str:
    """An address of this machine at which it is reached."""
    ip = str(listening.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ip, ip)


def in_bytes(value: str | bytes) -> bytes:
    """What C++ gives as bytes and Python mostly as text."""
    return value.encode() if isinstance(value, str) else bytes(value)
