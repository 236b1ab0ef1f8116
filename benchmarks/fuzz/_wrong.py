"""Datagrams that no rank may believe, each kind by its name; they follow from a seed and from what was heard."""

import json
import random
from collections.abc import Callable
from typing import Any

from benchmarks.fuzz._tap import Tap
from distlab.cluster.message_signer import ANYONE, HEAD, MAC_BYTES, MessageSigner, mac_of

WRONG: list[Any] = [[1], {"a": 1}, "x" * 300, None, True, -1, 9, 10**30, 1.5, [[[]]]]
CLAIM = {
    "rank": 1, "world_size": 3, "run_mode": "dp", "version": "v1", "settings": {}, "host": "elsewhere", "pid": 7,
    "uid": "stranger", "outward_ip": "",
}  # fmt: skip
VERDICT = {"exit_code": 3, "sentence": "all is lost", "lost": [{"rank": 0, "step": 1, "reason": "said so"}]}
BEAT = {
    "kind": "beat", "rank": 1, "turn": 0, "calls": 0, "step": 0, "phase": "start", "in_phase_s": 0.0, "memory": None,
    "accepted": 0, "bound": 0, "ended": 255, "left": 255, "counts": [0, 10**9], "hears": [[1, [1]]],
}  # fmt: skip


class Wrong:
    """Makes one datagram of a kind at a time; `key` is the run's, for what a defective rank might send."""

    def __init__(self, seed: int, key: bytes, tap: Tap) -> None:
        self._random = random.Random(seed)
        self._tap, self._key = tap, key
        self._insider, self._stranger = MessageSigner(key), MessageSigner(bytes(32))
        self.kinds: dict[str, Callable[[], bytes]] = {
            "random bytes": lambda: self._random.randbytes(self._random.randrange(1500)),
            "larger than allowed": lambda: b"rkl1" + self._random.randbytes(self._random.randrange(34_000, 60_000)),
            "JSON nested deep": lambda: b"[" * self._random.randrange(1000, 16_000),
            "JSON without a seal": lambda: json.dumps(self._message()).encode(),
            "sealed with another key": lambda: self._stranger.seal(self._message(), self._audience()),
            "real ones, replayed": self._real,
            "real ones, cut": lambda: (real := self._real())[: self._random.randrange(len(real))],
            "real ones, a bit changed": self._changed,
            "sealed with the key, wrong inside": self._wrong_inside,
        }

    def _real(self) -> bytes:
        heard = self._tap.heard
        return heard[self._random.randrange(len(heard))] if heard else b"rkl1"

    def _changed(self) -> bytes:
        datagram = bytearray(self._real())
        datagram[self._random.randrange(len(datagram))] ^= 1 << self._random.randrange(8)
        return bytes(datagram)

    def _audience(self) -> bytes:
        return bytes.fromhex(self._tap.sealed["token"]) if self._tap.sealed else ANYONE

    def _message(self) -> dict[str, Any]:
        """What once ended a run: a claim, a verdict or a beat with a field that is wrong, or none that is."""
        message: dict[str, Any] = self._random.choice(
            [
                {"kind": "claim", "claim": CLAIM | {"world_size": 4}, "knows": 0},
                {
                    "kind": "claim",
                    "knows": 0,
                    "claim": CLAIM | {self._random.choice(list(CLAIM)): self._random.choice(WRONG)},
                },
                {"kind": "verdict", "verdict": VERDICT, "stopped": False},
                BEAT,
                BEAT | {self._random.choice(list(BEAT)): self._random.choice(WRONG)},
                {"kind": "killed", "rank": 2},
            ]
        )
        return message

    def _wrong_inside(self) -> bytes:
        """By one who has the key: a body that is no message."""
        body = self._random.choice(
            [b"[" * 9000, b'{"kind":"beat","rank":[1]}', b'{"kind":"killed","rank":1024}', b"\xff",
             b'{"kind":["claim"]}', json.dumps(BEAT | {"in_phase_s": 10**400}).encode(),
             json.dumps(BEAT | {"phase": "\ud800"}).encode(),
             b'{"kind":"claim","claim":{"rank":10,"world_size":10}}', b'{"kind":"verdict","verdict":{},"stopped":1}']
        )  # fmt: skip
        head = self._insider.seal({}, self._audience())[: HEAD.size]
        return head + mac_of(self._key, head + bytes(MAC_BYTES) + body) + body
