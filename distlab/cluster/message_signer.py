"""Signed UDP messages: what ranks send each other carries an HMAC with the key of the run; a sender without it is not
believed.

A datagram is a head, its HMAC-SHA256 (RFC 2104) over head and body, and a body of JSON:

    b"rkl1" | hint of the key, 4 | sender, 8 | audience, 8 | number, 8 | HMAC, 32 | JSON, at most MAX_BODY_BYTES

The *sender* is a random number of each MessageSigner, and its messages are *numbered*: each counts once, and none that
is WINDOW older than the newest. The *audience* is what the message is for, a number that was drawn for this run (its
token, an asker, a rendezvous server): so words of another run are none here, though the key be the same. What is wrong
is dropped and counted before a byte of JSON is read, which then has to be as its kind is written
(authenticated_messages.py). Nothing is hidden by this: who listens on the wire reads all. Sealing or opening takes some
tens of microseconds.

Imports nothing of the lab: the heartbeat helper is a small process without site-packages.
"""

import hmac
import json
import os
import struct
import threading
from typing import Any

MAGIC = b"rkl1"
HEAD = struct.Struct("!4s4s8s8sQ")
MAC_BYTES = 32
MAX_BODY_BYTES = 32768  # a heartbeat of 1,024 ranks has 14 kB, and more where they hear differently
MAX_BYTES = HEAD.size + MAC_BYTES + MAX_BODY_BYTES
MAX_TEXT = 1024  # characters: what is longer is cut before it is sent
ANYONE = bytes(8)  # the audience of who does not know whom it speaks to: believed by none but the board


def hint_of(key: bytes) -> bytes:
    """What tells two keys apart in a head: an honest rank with another key is called just that."""
    return hmac.digest(key, b"distlab hint of the key", "sha256")[:4]


def derive_name(key: bytes, what: str) -> str:
    """A name that only who has the key can know, such as the prefix of a run's keys in the store."""
    return hmac.digest(key, what.encode(), "sha256")[:16].hex()


class MessageSigner:
    """Seals the messages of one sender. A child process makes a Seal of its own: two that count alike are replays."""

    def __init__(self, key: bytes) -> None:
        self.key, self.sender = key, os.urandom(8)
        self._hint = hint_of(key)
        self._number = 0
        self._lock = threading.Lock()

    def seal(self, message: dict[str, Any], audience: bytes) -> bytes:
        """The datagram of `message`, for `audience` alone; raises ValueError where it is too long."""
        body = _json(cut(message, MAX_TEXT))
        if len(body) > MAX_BODY_BYTES:
            body = _json(cut(message, MAX_TEXT // 16))
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"a message of {len(body)} B is longer than the {MAX_BODY_BYTES} B that are allowed")
        with self._lock:
            self._number += 1
            number = self._number
        head = HEAD.pack(MAGIC, self._hint, self.sender, audience, number)
        return head + hmac.digest(self.key, head + body, "sha256") + body


def cut(value: Any, most: int) -> Any:
    """The same with all texts cut to `most` characters, and without what cannot be written as UTF-8, as bytes of a
    path that are none."""
    if isinstance(value, dict):
        return {name: cut(each, most) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [cut(each, most) for each in value]
    return value[:most].encode(errors="replace").decode() if isinstance(value, str) else value


def _json(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def mac_of(key: bytes, datagram: bytes) -> bytes:
    """What the HMAC of a datagram has to be."""
    return hmac.digest(key, datagram[: HEAD.size] + datagram[HEAD.size + MAC_BYTES :], "sha256")
