"""A client without the run's key: the bytes that it sends to a port, and the answers."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from distlab.techniques.transport.handshake import MAGIC, NONCE_BYTES, PROOF_BYTES, Who, proof
from distlab.techniques.transport.store_server import Get, Set, framed

HERE = "127.0.0.1"
NONCE = bytes(NONCE_BYTES)
REQUEST = framed(Set(1, b"lab/exchange/1/verdict/all", b"0"))
FORGED: dict[str, bytes] = {
    "nothing": b"",
    "garbage": os.urandom(600),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "half a greeting": MAGIC,
    "a greeting and a proof with another key": MAGIC + NONCE + proof(b"another", b"dialler", "store", NONCE, Who(1)),
    "a greeting and zeros": MAGIC + NONCE + bytes(PROOF_BYTES),
    "a request for a value": framed(Get(1, b"a", 9.0)),
    "a request to set one": REQUEST,
    "a line of JSON": json.dumps({"rank": 1, "life": 1, "proof": "é"}, ensure_ascii=False).encode() + b"\n",
    "a lone surrogate": rb'{"rank": 1, "life": 1, "proof": "\ud800"}' + b"\n",
    "a number without end": b'{"rank": ' + b"9" * 5000 + b"}\n",
    "deep JSON": b"[" * 100_000 + b"\n",
}


def answer_to(port: int, data: bytes, host: str = HERE) -> bytes:
    """Return the answer of a port to `data`, up to the end of the connection or a pause of 0.3 s."""
    answer = b""
    with suppress(OSError), socket.create_connection((host, port), 2.0) as connection:
        connection.settimeout(0.3)
        connection.sendall(data)
        while new := connection.recv(4096):
            answer += new
    return answer


def answers_to_forged(port: int) -> dict[str, bytes]:
    """Return the answers to all forged messages."""
    return {name: answer_to(port, data) for name, data in FORGED.items()}


def attack_as_tcp_store(port: int) -> str:
    """Try to list and overwrite all keys with torch's own client; return what it could do, empty if nothing."""
    try:
        store = dist.TCPStore(HERE, port, None, False, timedelta(seconds=1), wait_for_workers=False)
        keys = store.list_keys()
        for key in keys:
            store.set(key, "0")
    except RuntimeError:
        return ""
    return f"it listed and wrote {keys}"


@contextmanager
def silent(port: int, count: int) -> Iterator[None]:
    """Open `count` connections that send nothing."""
    opened = [socket.create_connection((HERE, port), 2.0) for _ in range(count)]
    try:
        yield
    finally:
        for each in opened:
            each.close()
