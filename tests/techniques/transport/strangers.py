"""Who has no key and knows the protocols: what it says at a port, and what came of it."""

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
    "words of a line": json.dumps({"rank": 1, "life": 1, "proof": "é"}, ensure_ascii=False).encode() + b"\n",
    "a lone surrogate": rb'{"rank": 1, "life": 1, "proof": "\ud800"}' + b"\n",
    "a number without end": b'{"rank": ' + b"9" * 5000 + b"}\n",
    "deep JSON": b"[" * 100_000 + b"\n",
}


def told(port: int, words: bytes, host: str = HERE) -> bytes:
    """What is answered to them at a port, until it hangs up or says no more."""
    answer = b""
    with suppress(OSError), socket.create_connection((host, port), 2.0) as connection:
        connection.settimeout(0.3)
        connection.sendall(words)
        while new := connection.recv(4096):
            answer += new
    return answer


def told_all(port: int) -> dict[str, bytes]:
    """The answers to all that is forged."""
    return {name: told(port, words) for name, words in FORGED.items()}


def as_torch(port: int) -> str:
    """What comes of torch's own client at a port: with it a stranger listed, read and wrote what ranks had written."""
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
    """So many connections that say nothing."""
    opened = [socket.create_connection((HERE, port), 2.0) for _ in range(count)]
    try:
        yield
    finally:
        for each in opened:
            each.close()
