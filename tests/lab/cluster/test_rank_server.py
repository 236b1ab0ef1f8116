"""Rank 0's server with connections from this process: which messages each rank gets."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.cluster import oom_notice
from distlab.lab.cluster.admission import Admission
from distlab.lab.cluster.join import Uplink, dial, signed_address, store_at
from distlab.lab.cluster.messages import (
    PURPOSE,
    Acknowledge,
    Ask,
    Claim,
    Committed,
    Ending,
    Heartbeat,
    Join,
    Killed,
    Leave,
    Living,
    MayLeave,
    Place,
    Places,
    RanksLost,
    Refused,
    Returned,
    RunEnded,
    Sealed,
    Verdict,
    Waiting,
)
from distlab.lab.cluster.rank_server import RankServer, Strangers
from distlab.lab.report.records import Lost
from distlab.techniques.transport.handshake import Unproven, Who, listen
from distlab.techniques.transport.store_server import Peer, framed

pytestmark = pytest.mark.timeout(60)
HERE, KEY, TOKEN = "127.0.0.1", b"the key", "abcd"
LOST_AFTER_S = 1.0


def claim(rank: int, life: int = 1) -> Claim:
    return Claim(rank, 3, "dp", "v1", {}, "host", 100 + rank, f"uid{rank}.{life}", "", 7000 + rank)


class World:
    """The server of a run of three ranks, and their connections."""

    def __init__(self) -> None:
        admission = Admission(claim(0), "dp-1", 60.0, LOST_AFTER_S)
        self.printed: list[str] = []
        deadline = time.monotonic() + 30
        self.server = RankServer(
            listen(HERE), KEY, 0, HERE, admission, TOKEN, deadline, "in 30 s", Strangers(self.printed.append)
        )
        self.uplinks: dict[int, Uplink] = {}
        self.messages: dict[int, list[Any]] = {}

    def join(self, rank: int, life: int = 1, token: str = "") -> None:
        uplink = self.uplinks[rank] = dial(HERE, self.server.port, KEY, Who(rank, life))
        self.messages[rank] = []
        uplink.send(Join(claim(rank, life), token))

    def until(self, rank: int, kind: type, bound_s: float = 5.0) -> Any:
        """Return the next message of a kind to a rank; all ranks send heartbeats meanwhile."""
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            for each in self.uplinks.values():
                each.send(Heartbeat(Place(step=4, phase="train")))
            self.messages[rank] += self.uplinks[rank].messages(0.02)
            while self.messages[rank]:
                message = self.messages[rank].pop(0)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} for rank {rank}")

    def seal(self) -> "World":
        for rank in range(3):
            self.join(rank)
        for rank in range(3):
            self.until(rank, Sealed)
        return self

    def close(self) -> None:
        for uplink in self.uplinks.values():
            uplink.close()
        self.server.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    assert made.server._thread.is_alive(), "the server thread has ended"
    made.close()


def test_all_ranks_get_the_missing_ranks_and_then_the_members(world: World) -> None:
    world.join(0)
    world.join(2)
    assert world.until(2, Waiting).sentence in ("waiting for rank 1", "waiting for ranks 1 and 2")
    world.join(1)
    for rank in range(3):
        sealed = world.until(rank, Sealed)
        assert (sealed.token, sealed.run_id) == (TOKEN, "dp-1")
        assert [(each.rank, each.ip, each.life, each.next_port) for each in sealed.members] == [
            (each, HERE, 1, 7000 + each) for each in range(3)
        ]


def test_a_refusal_reaches_all_ranks_also_later_ones(world: World) -> None:
    world.join(0)
    uplink = world.uplinks[1] = dial(HERE, world.server.port, KEY, Who(1))
    world.messages[1] = []
    uplink.send(Join(Claim(1, 4, "dp", "v1", {}, "host")))
    assert {world.until(rank, Refused).sentence.partition(" ")[0] for rank in (0, 1)} == {"WORLD_SIZE=4"}
    assert not world.server.all_informed()
    for rank in (2, 3):
        world.join(rank)
        world.until(rank, Refused)
    deadline = time.monotonic() + 5
    while not world.server.all_informed():  # the last one may have read it before the server knows that it was sent
        assert time.monotonic() < deadline


@pytest.mark.parametrize("data", [b"\0\0\0\3abc", b"\xff\xff\xff\xff", framed(Heartbeat(Place()))[:4] + b"\x93" * 99])
def test_an_invalid_message_ends_its_own_connection_only(world: World, data: bytes) -> None:
    stranger = dial(HERE, world.server.port, KEY, Who(2))
    stranger.connection.sendall(data)
    stranger.connection.settimeout(5)
    assert stranger.connection.recv(1) == b""
    world.seal()
    assert any("with an invalid message" in uplink for uplink in world.printed)


def test_a_connection_with_another_key_is_refused_and_counted(world: World) -> None:
    with pytest.raises(Unproven):
        dial(HERE, world.server.port, b"another", Who(1))
    with socket.create_connection((HERE, world.server.port)):
        world.seal()
    assert world.server.strangers.by_fault == {Strangers.OTHER_KEY: 1}
    assert "1 connections had another key, the last one from 127.0.0.1" in (world.server.strangers.wrong_key_note())


def test_the_store_is_served_at_the_same_port(world: World) -> None:
    one, other = (store_at(HERE, world.server.port, KEY) for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_the_place_of_a_rank_reaches_all_others(world: World) -> None:
    world.seal()
    deadline = time.monotonic() + 5
    while (places := dict(world.until(2, Places).places))[1].step != 4:
        assert time.monotonic() < deadline
    assert places[1] == Place(step=4, phase="train")


def test_the_first_verdict_reaches_the_others_and_no_later_one(world: World) -> None:
    world.seal()
    verdict = Verdict(3, "rank 1 failed", (Lost(1, 4, "failed"),))
    world.uplinks[1].send(Ending(verdict, False))
    assert world.until(0, RunEnded) == world.until(2, RunEnded) == RunEnded(verdict, False)
    world.uplinks[2].send(Ending(Verdict(3, "rank 2 failed"), True))
    world.uplinks[2].close()
    with pytest.raises(AssertionError, match="no RunEnded"):
        world.until(0, RunEnded, 2 * LOST_AFTER_S)


def test_an_ended_connection_is_reported_with_its_cause(world: World, tmp_path: Path) -> None:
    """The process that started the rank sends the message from a file that the rank wrote."""
    world.seal()
    path = tmp_path / "notice"
    message = framed(Killed(2, oom_notice.HOW))
    oom_notice.prepare(2, (HERE, world.server.port), KEY, PURPOSE, message, path)
    assert not path.exists(), "it has no reader"
    path.touch()
    oom_notice.prepare(2, (HERE, world.server.port), KEY, PURPOSE, message, path)
    assert path.stat().st_mode & 0o777 == 0o600
    world.until(0, Places)
    world.uplinks.pop(2).close()
    assert oom_notice.send(path) == f"rank 2 was {oom_notice.HOW}"
    run_end = world.until(0, RunEnded)
    assert run_end.verdict.sentence == f"rank 2 lost at step 4 in train: {oom_notice.HOW}"
    assert [entry.rank for entry in run_end.verdict.lost] == [2]


def test_the_verdict_is_final_once_all_have_acknowledged_it_and_the_host_has_written_it(world: World) -> None:
    world.seal()
    world.server.has_verdict = True
    world.uplinks[1].send(Acknowledge())
    while world.server.unacknowledged() != [2]:
        world.until(1, Places)
    assert not world.server.is_final
    world.uplinks[2].send(Acknowledge())
    deadline = time.monotonic() + 5
    while not world.server.is_final:
        assert time.monotonic() < deadline
        world.until(2, Places)
    world.uplinks.pop(2).close()  # from here on a loss changes nothing
    world.uplinks[0].send(Acknowledge())
    world.until(1, Committed)
    world.uplinks[1].send(Leave())
    world.until(0, RanksLost)
    assert world.server.staying() == [] and world.server.run_end is None


def test_once_ranks_may_leave_the_others_continue_and_one_rejoins(world: World) -> None:
    world.seal()
    world.uplinks[0].send(MayLeave())
    world.until(1, Places)
    world.uplinks.pop(2).close()
    lost = world.until(1, RanksLost)
    assert [entry.rank for entry in lost.lost] == [2] and "rank 2 lost" in lost.sentence
    world.join(2, life=2, token="another")
    assert world.until(2, Refused).sentence == "the run that this rank had left is over"
    world.server.views.ended = True
    world.join(2, life=2, token=TOKEN)
    assert world.until(2, Refused).sentence == "the run that this rank had left is over"
    world.server.views.ended = False
    world.join(2, life=2, token=TOKEN)
    assert {member.rank: member.life for member in world.until(2, Sealed).members} == {0: 1, 1: 1, 2: 2}
    assert world.until(1, Returned).member.life == 2
    world.uplinks[2].send(Ask(b"me"))
    while not (living := world.until(1, Living)).requests:
        pass
    assert living.requests == [(2, 2, b"me")]


def test_the_host_gets_the_verdict_after_all_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, bytes]] = []
    send_bytes = world.server.send_bytes

    def record(peer: Peer, message: bytes) -> None:
        sent.append((peer.who.rank, message))
        send_bytes(peer, message)

    world.seal()
    monkeypatch.setattr(world.server, "send_bytes", record)
    world.uplinks.pop(1).close()
    run_end = world.until(0, RunEnded)
    assert [rank for rank, message in sent if message == framed(run_end)] == [2, 0]


def test_a_rank_whose_earlier_process_is_alive_cannot_rejoin(world: World) -> None:
    world.seal()
    world.uplinks[0].send(MayLeave())
    world.until(1, Places)
    with closing(world.uplinks[2]):
        world.join(2, life=2, token=TOKEN)
        assert world.until(2, Refused).sentence == "rank 2 is still in the run"


def test_the_address_of_rank_0_is_signed_with_the_key() -> None:
    assert signed_address(KEY, "77 ") != signed_address(b"another", "77 ")
    assert signed_address(KEY, "77 ").endswith(" 77 ")
