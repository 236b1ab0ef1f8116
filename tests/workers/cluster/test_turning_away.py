"""Rank 0's watch on a start that is refused after the seal: it ends only once every member knows why, or listens to
it."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from workers.cluster import watch as watches
from workers.cluster.board import Board, Claim, Member
from workers.cluster.board_socket import Desk, ask, send, udp_socket
from workers.cluster.rendezvous import Cluster
from workers.cluster.verdict import Verdict
from workers.cluster.watch import PERIOD_S, Watch
from workers.config import Config

CONFIG = Config(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1")  # type: ignore[call-arg]
HOST, MEMBER = [Claim(rank, 2, "dp", "v1", uid=f"uid{rank}") for rank in (0, 1)]


class Started:
    """A watch of rank 0 whose end is noted, the desk it serves, and rank 1's socket."""

    def __init__(self) -> None:
        self.own, self.of_member, at_desk = [udp_socket(socket.AF_INET, "127.0.0.1") for _ in range(3)]
        self.board = Board(HOST, "127.0.0.1", self.own.getsockname()[1], "dp-1", window_s=60.0)
        self.desk = Desk(self.board, at_desk)
        ip, port = self.of_member.getsockname()
        self.board.answer(MEMBER, ip, port, 0.0)
        members: dict[int, Member] = self.board.seal("token", 0.0)
        cluster = Cluster(0, 2, None, members, self.own, "dp-1", "token", self.desk)  # type: ignore[arg-type]
        self.watch = Watch(cluster, CONFIG, print, lambda *_: None)
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
    one.board.answer(replace(HOST, rank=2, world_size=3, uid="stranger"), "127.0.0.1", 9, 0.1)
    one.watch.start()
    yield one
    if not one.ended.is_set():
        one.watch.finish()
    one.close()


def beat(started: Started) -> None:
    message: dict[str, Any] = {
        "kind": "beat", "rank": 1, "turn": 0, "calls": 0, "step": 0, "phase": "start", "in_phase_s": 0.0, "memory": None,
        "ended": 0, "rows": {"1": [1, 3]}, "token": "token",
    }  # fmt: skip
    send(started.of_member, message, started.own.getsockname())


def question(started: Started) -> None:
    ask(started.of_member, MEMBER, started.desk.udp.getsockname())


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
