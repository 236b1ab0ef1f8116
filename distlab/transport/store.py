"""A store that only ranks of the run can read and write: what torch's process groups meet in, and the lab's exchanges.

A `dist.Store` written in Python: gloo and NCCL call it from C++ for every set, get, wait, check and add
(tests/transport/test_store.py). Who hosts it is store_server.py; both ends prove the key first (handshake.py), so
a stranger that finds the port can neither list nor read nor write a key.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.transport.handshake import NOBODY, TurnedAway, dialled, listen, unheeded
from distlab.transport.store_server import (
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


# Values of plain kinds to every rank of a group, as bytes in which nothing can be called.
#
# c10d's `all_gather_object` sends pickles, and whoever reads a pickle runs what is in it: a connection of gloo's
# proves nothing of who is at its other end. Here a value is JSON and the memory of its tensors. What is read is a
# number, a text, a list, a tuple, a set, a dict, a tensor, or a record of a class that the reader names.
#
#     length of the JSON, 8 | JSON | tensor, tensor ...

HEAD = struct.Struct("!Q")
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
MAX_BYTES = 1 << 34


def all_gather_plain(mine: Any, group: dist.ProcessGroup, classes: Sequence[type] = ()) -> list[Any]:
    """What each rank of `group` has, on all; a collective. Raises ValueError where it cannot be read."""
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
    data = torch.frombuffer(bytearray(to_bytes(mine, classes)), dtype=torch.uint8).to(device)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(data)], device=device), group=group)
    counts = lengths.tolist()
    if not all(0 < count <= MAX_BYTES for count in counts):
        raise ValueError(f"ranks send {counts} B: allowed are up to {MAX_BYTES} B each")
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded, group=group)
    return [from_bytes(bytes(row[:count].cpu().numpy()), classes) for row, count in zip(rows, counts, strict=True)]


def to_bytes(value: Any, classes: Sequence[type] = ()) -> bytes:
    """The bytes of a value; raises TypeError where it is of another kind."""
    memories: list[bytes] = []
    text = json.dumps(_plain(value, {each: each.__name__ for each in classes}, memories)).encode()
    return HEAD.pack(len(text)) + text + b"".join(memories)


def _plain(value: Any, names: dict[type, str], memories: list[bytes]) -> Any:
    """As JSON has it: what JSON does not know is a dict of one entry."""

    def each_of(values: Any) -> list[Any]:
        return [_plain(each, names, memories) for each in values]

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()
        memories.append(bytes(held.reshape(-1).view(torch.uint8).numpy()))
        return {"tensor": [str(held.dtype), list(held.shape)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if type(value) in names:
        inner = [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else list(value)
        return {"record": [names[type(value)], each_of(inner)]}
    if isinstance(value, dict):
        return {"dict": [each_of(pair) for pair in value.items()]}
    for kind, name in ((list, ""), (torch.Size, "size"), (tuple, "tuple"), (set, "set"), (frozenset, "set")):
        if type(value) is kind:
            return {name: each_of(value)} if name else each_of(value)
    raise TypeError(f"a {type(value).__name__} is of no plain kind")


def from_bytes(data: bytes, classes: Sequence[type] = ()) -> Any:
    """The value of these bytes; raises ValueError where they are none."""
    try:
        (length,) = HEAD.unpack_from(data)
        if length > len(data):
            raise ValueError("it is cut")
        text = json.loads(data[HEAD.size : HEAD.size + length])
        reader = _Reader(memoryview(data)[HEAD.size + length :], {each.__name__: each for each in classes})
        value = reader.read(text)
    except Exception as error:
        raise ValueError(f"what a rank has sent cannot be read: {error}") from None
    if len(reader.memory):
        raise ValueError("what a rank has sent is longer than it says")
    return value


class _Reader:
    """Makes values of JSON; `memory` is that of the tensors that are still to come."""

    def __init__(self, memory: memoryview, classes: dict[str, type]) -> None:
        self.memory, self._classes = memory, classes

    def read(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.read(each) for each in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, inner),) = plain.items()
        if kind == "tensor":
            return self._tensor(*inner)
        if kind == "dtype":
            return DTYPES[inner]
        if kind == "record":
            return self._classes[inner[0]](*self.read(inner[1]))
        if kind == "dict":
            return dict(self.read(pair) for pair in inner)
        return {"size": torch.Size, "tuple": tuple, "set": set}[kind](self.read(inner))

    def _tensor(self, dtype: str, shape: list[int]) -> Tensor:
        if any(type(each) is not int or each < 0 for each in shape):
            raise ValueError(f"a tensor of shape {shape}")
        made = DTYPES[dtype]
        count = torch.Size(shape).numel() * made.itemsize
        if count > len(self.memory):
            raise ValueError("a tensor that is cut")
        taken, self.memory = bytearray(self.memory[:count]), self.memory[count:]
        if not count:
            return torch.empty(shape, dtype=made)
        return torch.frombuffer(taken, dtype=made).reshape(shape)
