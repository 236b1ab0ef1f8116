"""Rank 0's watch on a start that is refused after the seal: it ends only once every member knows why, or listens to
it."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from distlab.cluster import watchdog as watches
from distlab.cluster.authenticated_messages import Dropped, MessageVerifier
from distlab.cluster.heartbeat_helper import PERIOD_S
from distlab.cluster.lost_ranks import Verdict
from distlab.cluster.message_signer import MessageSigner
from distlab.cluster.rendezvous import Cluster
from distlab.cluster.rendezvous_server import (
    STRANGER_S,
    Claim,
    Member,
    RendezvousServer,
    RendezvousSocket,
    send,
    udp_socket,
)
from distlab.cluster.watchdog import Watchdog
from distlab.config import Config

CONFIG = Config(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1")  # type: ignore[call-arg]
KEY, TOKEN = b"k" * 32, b"the run."
HOST, MEMBER = [Claim(rank, 2, "dp", "v1", uid=f"uid{rank}") for rank in (0, 1)]


class Started:
    """A watch of rank 0 whose end is noted, the desk it serves, and rank 1's socket."""

    def __init__(self) -> None:
        self.own, self.of_member, at_desk = [udp_socket(socket.AF_INET, "127.0.0.1") for _ in range(3)]
        self.board = RendezvousServer(HOST, "127.0.0.1", self.own.getsockname()[1], "dp-1", window_s=60.0)
        dropped = Dropped(print)
        self.desk = RendezvousSocket(self.board, at_desk, KEY, dropped)
        ip, port = self.of_member.getsockname()
        self.board.answer(MEMBER, ip, port, 0.0)
        members: dict[int, Member] = self.board.seal(TOKEN.hex(), 29501, 0.0)
        opener = MessageVerifier(KEY, TOKEN, dropped)
        signer = MessageSigner(KEY)
        cluster = Cluster(0, 2, None, 29501, members, self.own, "dp-1", TOKEN, signer, opener, dropped, self.desk)  # type: ignore[arg-type]
        self.watch = Watchdog(cluster, CONFIG, print, lambda *_: None)
        self.ended, self.verdict = threading.Event(), Verdict(0, "")
        self.watch._departure.leave = self._leave  # type: ignore[assignment, method-assign]

    def _leave(self, verdict: Verdict, _survivors: list[int]) -> None:
        """In place of the end of this process: that of the thread."""
        self.verdict = verdict
        self.ended.set()
        self.watch._ended.set()

    def close(self) -> None:
        self.watch._signals.close()
        for one in (self.own, self.of_member, self.desk.udp):
            one.close()


@pytest.fixture
def started() -> Iterator[Started]:
    """The watch runs, and a stranger of another WORLD_SIZE has come after the seal."""
    one = Started()
    for now in (0.1, STRANGER_S + 0.2):
        one.board.answer(replace(HOST, rank=2, world_size=3, uid="stranger"), "127.0.0.1", 9, now)
    one.watch.start()
    yield one
    if not one.ended.is_set():
        one.watch.finish()
    one.close()


def beat(started: Started) -> None:
    message: dict[str, Any] = {
        "kind": "beat", "rank": 1, "turn": 0, "calls": 0, "step": 0, "phase": "start", "in_phase_s": 0.0, "memory": None,
        "accepted": 0, "bound": 0, "ended": 0, "left": 0, "counts": [0, 1], "hears": [[3, [1]]],
    }  # fmt: skip
    send(started.of_member, MessageSigner(KEY).seal(message, TOKEN), started.own.getsockname())


def question(started: Started) -> None:
    knock = {"kind": "claim", "claim": asdict(MEMBER), "knows": 0}
    send(started.of_member, MessageSigner(KEY).seal(knock, started.desk._seal.sender), started.desk.udp.getsockname())


@pytest.mark.parametrize("sign", [beat, question])
def test_rank_0_stays_for_a_member_on_its_way_in(started: Started, sign: Any) -> None:
    assert not started.ended.wait(4 * PERIOD_S)
    sign(started)
    assert started.ended.wait(8 * PERIOD_S)
    assert started.verdict.exit_code == 3
    assert started.verdict.sentence.startswith("WORLD_SIZE=3 on rank 2")


def test_rank_0_waits_for_no_member_for_ever(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    monkeypatch.setattr(watches, "LINGER_S", 2 * PERIOD_S)
    assert started.ended.wait(8 * PERIOD_S)
