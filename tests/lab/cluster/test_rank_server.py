"""Rank 0's server at its port, to which ranks of this process connect: what it tells whom."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.cluster import last_words
from distlab.lab.cluster.admission import Admission
from distlab.lab.cluster.join import Line, dial, in_an_agents_store, store_at
from distlab.lab.cluster.messages import (
    PURPOSE,
    Acknowledge,
    Ask,
    Back,
    Beat,
    Claim,
    Committed,
    Ending,
    Gone,
    Join,
    Killed,
    Leave,
    Living,
    MayLeave,
    Over,
    Place,
    Places,
    Refused,
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
    """The server of a run of three, and the lines of its ranks."""

    def __init__(self) -> None:
        admission = Admission(claim(0), "dp-1", 60.0, LOST_AFTER_S)
        self.said: list[str] = []
        deadline = time.monotonic() + 30
        self.server = RankServer(
            listen(HERE), KEY, 0, HERE, admission, TOKEN, deadline, "in 30 s", Strangers(self.said.append)
        )
        self.lines: dict[int, Line] = {}
        self.come: dict[int, list[Any]] = {}

    def join(self, rank: int, life: int = 1, token: str = "") -> None:
        line = self.lines[rank] = dial(HERE, self.server.port, KEY, Who(rank, life))
        self.come[rank] = []
        line.send(Join(claim(rank, life), token))

    def until(self, rank: int, kind: type, bound_s: float = 5.0) -> Any:
        """The first message of a kind that comes to a rank from now on; all ranks beat meanwhile."""
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            for each in self.lines.values():
                each.send(Beat(Place(step=4, phase="train")))
            self.come[rank] += self.lines[rank].messages(0.02)
            while self.come[rank]:
                message = self.come[rank].pop(0)
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
        for line in self.lines.values():
            line.close()
        self.server.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    assert made.server._thread.is_alive(), "nothing that it read has ended it"
    made.close()


def test_all_hear_who_is_missing_and_then_who_is_there(world: World) -> None:
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


def test_a_refusal_reaches_all_that_are_there_and_those_that_come(world: World) -> None:
    world.join(0)
    line = world.lines[1] = dial(HERE, world.server.port, KEY, Who(1))
    world.come[1] = []
    line.send(Join(Claim(1, 4, "dp", "v1", {}, "host")))
    assert {world.until(rank, Refused).sentence.partition(" ")[0] for rank in (0, 1)} == {"WORLD_SIZE=4"}
    assert not world.server.all_told()
    for rank in (2, 3):
        world.join(rank)
        world.until(rank, Refused)
    deadline = time.monotonic() + 5
    while not world.server.all_told():  # the last one may have read it before the server knows that it was sent
        assert time.monotonic() < deadline


@pytest.mark.parametrize("said", [b"\0\0\0\3abc", b"\xff\xff\xff\xff", framed(Beat(Place()))[:4] + b"\x93" * 99])
def test_what_is_no_message_ends_its_own_connection_alone(world: World, said: bytes) -> None:
    stranger = dial(HERE, world.server.port, KEY, Who(2))
    stranger.connection.sendall(said)
    stranger.connection.settimeout(5)
    assert stranger.connection.recv(1) == b""
    world.seal()
    assert any("with an invalid message" in line for line in world.said)


def test_who_has_another_key_gets_nothing_and_is_counted(world: World) -> None:
    with pytest.raises(Unproven):
        dial(HERE, world.server.port, b"another", Who(1))
    with socket.create_connection((HERE, world.server.port)):
        world.seal()
    assert world.server.strangers.by_fault == {Strangers.OTHER_KEY: 1}
    assert "1 connections came that have another key, the last one from 127.0.0.1" in (
        world.server.strangers.said_beside_the_missing()
    )


def test_the_store_is_served_at_the_same_port(world: World) -> None:
    one, other = (store_at(HERE, world.server.port, KEY) for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_where_a_rank_is_reaches_all_others(world: World) -> None:
    world.seal()
    deadline = time.monotonic() + 5
    while (places := dict(world.until(2, Places).places))[1].step != 4:
        assert time.monotonic() < deadline
    assert places[1] == Place(step=4, phase="train")


def test_the_end_of_one_is_told_to_the_others_and_no_other_verdict_after_it(world: World) -> None:
    world.seal()
    verdict = Verdict(3, "rank 1 failed", (Lost(1, 4, "failed"),))
    world.lines[1].send(Ending(verdict, False))
    assert world.until(0, Over) == world.until(2, Over) == Over(verdict, False)
    world.lines[2].send(Ending(Verdict(3, "rank 2 failed"), True))
    world.lines[2].close()
    with pytest.raises(AssertionError, match="no Over"):
        world.until(0, Over, 2 * LOST_AFTER_S)


def test_a_connection_that_ends_is_told_with_what_is_known_of_it(world: World, tmp_path: Path) -> None:
    """By the process that started the rank, which has its words from a file that the rank left."""
    world.seal()
    place = tmp_path / "words"
    words = framed(Killed(2, last_words.HOW))
    last_words.leave(2, (HERE, world.server.port), KEY, PURPOSE, words, place)
    assert not place.exists(), "nobody is there to read it"
    place.touch()
    last_words.leave(2, (HERE, world.server.port), KEY, PURPOSE, words, place)
    assert place.stat().st_mode & 0o777 == 0o600
    world.until(0, Places)
    world.lines.pop(2).close()
    assert last_words.speak(place) == f"rank 2 was {last_words.HOW}"
    over = world.until(0, Over)
    assert over.verdict.sentence == f"rank 2 lost at step 4 in train: {last_words.HOW}"
    assert [entry.rank for entry in over.verdict.lost] == [2]


def test_the_verdict_stands_once_all_others_have_acknowledged_it_and_its_host_has_written_it(world: World) -> None:
    world.seal()
    world.server.judged = True
    world.lines[1].send(Acknowledge())
    while world.server.unacknowledged() != [2]:
        world.until(1, Places)
    assert not world.server.bound
    world.lines[2].send(Acknowledge())
    deadline = time.monotonic() + 5
    while not world.server.bound:
        assert time.monotonic() < deadline
        world.until(2, Places)
    world.lines.pop(2).close()  # from here on a loss changes nothing
    world.lines[0].send(Acknowledge())
    world.until(1, Committed)
    world.lines[1].send(Leave())
    world.until(0, Gone)
    assert world.server.staying() == [] and world.server.over is None


def test_once_ranks_may_leave_the_others_go_on_and_one_comes_back(world: World) -> None:
    world.seal()
    world.lines[0].send(MayLeave())
    world.until(1, Places)
    world.lines.pop(2).close()
    gone = world.until(1, Gone)
    assert [entry.rank for entry in gone.lost] == [2] and "rank 2 lost" in gone.sentence
    world.join(2, life=2, token="another")
    assert world.until(2, Refused).sentence == "the run that this rank had left is over"
    world.server.views.ended = True
    world.join(2, life=2, token=TOKEN)
    assert world.until(2, Refused).sentence == "the run that this rank had left is over"
    world.server.views.ended = False
    world.join(2, life=2, token=TOKEN)
    assert {member.rank: member.life for member in world.until(2, Sealed).members} == {0: 1, 1: 1, 2: 2}
    assert world.until(1, Back).member.life == 2
    world.lines[2].send(Ask(b"me"))
    while not (living := world.until(1, Living)).asking:
        pass
    assert living.asking == [(2, 2, b"me")]


def test_the_host_which_may_end_at_once_is_told_after_all_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, bytes]] = []
    send_bytes = world.server.send_bytes

    def noted(peer: Peer, message: bytes) -> None:
        sent.append((peer.who.rank, message))
        send_bytes(peer, message)

    world.seal()
    monkeypatch.setattr(world.server, "send_bytes", noted)
    world.lines.pop(1).close()
    over = world.until(0, Over)
    assert [rank for rank, message in sent if message == framed(over)] == [2, 0]


def test_a_rank_that_has_a_double_in_the_run_is_not_taken_back(world: World) -> None:
    world.seal()
    world.lines[0].send(MayLeave())
    world.until(1, Places)
    with closing(world.lines[2]):
        world.join(2, life=2, token=TOKEN)
        assert world.until(2, Refused).sentence == "rank 2 is still in the run"


def test_where_rank_0_serves_is_believed_by_the_key_alone() -> None:
    assert in_an_agents_store(KEY, "77 ") != in_an_agents_store(b"another", "77 ")
    assert in_an_agents_store(KEY, "77 ").endswith(" 77 ")
