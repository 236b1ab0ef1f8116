"""The board without sockets and at its socket: what is refused, who waits, who is let in, and what is dropped."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distlab.cluster.address import Address, listening_socket, send, udp_socket
from distlab.cluster.authenticated_messages import Dropped, MessageVerifier
from distlab.cluster.message_signer import ANYONE, HEAD, MAC_BYTES, MessageSigner, mac_of
from distlab.cluster.rendezvous_server import ASKING_S, STRANGER_S, Claim, RendezvousServer, RendezvousSocket
from distlab.config import Config


def claim(rank: int, **changes: object) -> Claim:
    plain = Claim(rank, 3, "dp", "v1", {"LAB_STEPS": "5"}, f"host{rank}", 100 + rank, f"uid{rank}", "10.0.0.9")
    return replace(plain, **changes)  # type: ignore[arg-type]


def board(ip: str = "10.0.0.1") -> RendezvousServer:
    return RendezvousServer(claim(0), ip, 4000, "dp-1", window_s=60.0)


def ask(one: RendezvousServer, asked: Claim, now: float, heard_at: dict[int, float] | None = None) -> dict[str, object]:
    return one.answer(asked, f"10.0.0.{asked.rank + 1}", 4000 + asked.rank, now, heard_at)


def sealed_board() -> RendezvousServer:
    one = board()
    ask(one, claim(1), 0.0)
    ask(one, claim(2), 0.0)
    one.seal("token", 29501, 0.0)
    return one


def test_the_missing_are_named_until_all_are_there() -> None:
    one = board()
    assert ask(one, claim(2), 0.0) == {"wait": "waiting for rank 1"}
    assert ask(one, claim(1), 0.1) == {"wait": ""}
    members = one.seal("token", 29501, 0.2)
    assert [(member.host, member.ip, member.udp_port) for member in members.values()] == [
        ("host0", "10.0.0.1", 4000), ("host1", "10.0.0.2", 4001), ("host2", "10.0.0.3", 4002)
    ]  # fmt: skip
    assert ask(one, claim(1), 0.3)["sealed"] == one.sealed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 4}, ["WORLD_SIZE=4 on rank 1", "WORLD_SIZE=3 on rank 0"]),
        ({"run_mode": "comm"}, ["RUN_MODE=comm on rank 1", "RUN_MODE=dp on rank 0"]),
        ({"version": "v2"}, ["version of the code is v2 on rank 1", "version of the code is v1 on rank 0"]),
        ({"settings": {"LAB_STEPS": "6"}}, ["LAB_STEPS=6 on rank 1", "LAB_STEPS=5 on rank 0"]),
        ({"settings": {}}, ["LAB_STEPS=20 on rank 1", "LAB_STEPS=5 on rank 0"]),
        ({"settings": {"LAB_STEPS": "5", "LAB_BUG": "x"}}, ["LAB_BUG=x on rank 1", "LAB_BUG=unset on rank 0"]),
    ],
)
def test_what_differs_is_named_with_both_values_to_all(changes: dict[str, object], words: list[str]) -> None:
    one = board()
    refused = ask(one, claim(1, **changes), 0.0)["refuse"]
    assert isinstance(refused, str)
    assert all(word in refused for word in [*words, "host1", "host0"])
    assert ask(one, claim(2), 0.1) == {"refuse": refused}


def test_a_rank_beyond_the_world_breaks_it() -> None:
    one = board()
    assert "WORLD_SIZE=4 on rank 3" in str(ask(one, claim(3, world_size=4), 0.0)["refuse"])


def test_a_doubled_rank_is_refused_with_both_hosts() -> None:
    one, double = board(), claim(1, uid="other", host="elsewhere", pid=7)
    ask(one, claim(1), 0.0)
    assert "wait" in ask(one, double, 0.1)  # the first may be dead since 0.0
    ask(one, claim(1), 0.9)
    refused = str(ask(one, double, 1.0)["refuse"])
    assert "rank 1 runs twice, on host host1 (pid 101) and on host elsewhere (pid 7)" in refused
    assert ask(one, claim(1), 1.1) == {"refuse": refused}


def test_a_second_rank_0_is_doubled_too() -> None:
    assert "rank 0 runs twice" in str(ask(board(), claim(0, uid="other"), 0.0)["refuse"])


def test_a_rank_that_restarts_while_others_arrive_takes_its_own_place() -> None:
    one = board()
    ask(one, claim(1), 0.0)
    ask(one, claim(2), 0.0)
    assert ask(one, claim(1, uid="again", pid=7), ASKING_S + 0.1) == {"wait": "waiting for rank 2"}
    assert one.missing(ASKING_S + 0.1) == [2]


def test_the_successor_of_a_dead_rank_waits_for_the_end_of_the_old_run() -> None:
    """However fast it is back: until its silence counts, the predecessor is still thought alive."""
    one = sealed_board()
    for now in (3.1, 3.5, 4.0, 6.0):
        assert "earlier run" in str(ask(one, claim(1, uid="again"), now, {1: 3.2, 2: now})["wait"])
    assert one.refusal is None


def test_a_late_double_ends_only_itself() -> None:
    one, double = sealed_board(), claim(1, uid="other")
    assert "wait" in ask(one, double, 30.0, {1: 30.0, 2: 30.0})
    assert "twice" in str(ask(one, double, 31.0, {1: 31.0, 2: 31.0})["refuse"])
    assert one.refusal is None


def test_another_run_on_the_port_is_turned_away_and_ends_nothing() -> None:
    """With the same key, and as soon as it likes: its rank 0, its ranks of the same numbers and those beyond."""
    one, theirs = sealed_board(), {"world_size": 4, "settings": {}, "run_mode": "comm"}
    strangers = [claim(rank, uid=f"theirs{rank}", **theirs) for rank in range(4)]
    assert "waiting for rank 0 to decide about" in str(ask(one, strangers[3], 0.1)["wait"])
    said = str(ask(one, strangers[0], 0.5)["refuse"])
    assert said.startswith("this port is rank 0's of the run dp-1, on host host0 (pid 100)")
    assert "RUN_MODE=comm" in str(ask(one, strangers[1], 0.6)["refuse"])
    assert "WORLD_SIZE=4" in str(ask(one, strangers[3], STRANGER_S + 0.2)["refuse"])
    assert one.refusal is None


@pytest.mark.parametrize(("asked_at", "all_end"), [(1.0, True), (61.0, False)])
def test_a_rank_of_a_larger_world_without_a_rank_0_breaks_the_start(asked_at: float, all_end: bool) -> None:
    one, stranger = sealed_board(), claim(3, world_size=4)
    assert "wait" in ask(one, stranger, asked_at)
    assert "WORLD_SIZE=4 on rank 3" in str(ask(one, stranger, asked_at + STRANGER_S + 0.1)["refuse"])
    assert (one.refusal is not None) == all_end


def test_rank_0_stays_until_every_rank_has_heard() -> None:
    one = board()
    ask(one, claim(1), 0.0)
    ask(one, claim(2, world_size=4), 0.1)
    assert not one.all_told()
    ask(one, claim(1), 0.2)
    assert not one.all_told()  # rank 2 believes in a rank 3
    ask(one, claim(3), 0.3)
    assert one.all_told()


def test_after_the_seal_rank_0_stays_for_members_that_neither_know_nor_listen() -> None:
    one, stranger = sealed_board(), claim(3, world_size=4, uid="stranger")
    for now in (0.1, STRANGER_S + 0.2):
        ask(one, stranger, now)  # it has heard, no member has
    assert one.unaware(set()) == {1, 2}
    ask(one, claim(1), STRANGER_S + 0.3)
    assert one.unaware(set()) == {2}
    assert one.unaware({2}) == set()


def test_ranks_on_rank_0s_machine_are_found_by_others_too() -> None:
    one = RendezvousServer(claim(0), "127.0.1.1", 4000, "dp-1", 60.0)
    one.answer(claim(1), "127.0.0.1", 4001, 0.0)
    one.answer(claim(2), "10.0.0.3", 4002, 0.0)
    assert [member.ip for member in one.seal("token", 29501, 0.0).values()] == ["10.0.0.9", "10.0.0.9", "10.0.0.3"]


def test_a_claim_carries_what_must_agree_and_nothing_else() -> None:
    environ = {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LAB_STEPS": "7", "LAB_VARIANT": "flat,ring",
        "LAB_RUNS_DIR": "/tmp/x", "LAB_JOIN_TIMEOUT_S": "9", "LAB_CPUS": "1", "LAB_MEMORY": "900m", "LAB_PROOF": "0",
    }  # fmt: skip
    made = Claim.of(Config.read(environ), "v1", "")
    own = {"LAB_DEPTH": "4"}  # a default of dp's own
    assert made.settings == own | {"LAB_STEPS": "7", "LAB_VARIANT": "flat,ring", "LAB_PROOF": "0"}
    assert made.differences(made) is None


def test_ranks_of_different_texts_do_not_train_together() -> None:
    config = Config.read({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    one, other = (Claim.of(config, "v1", "", {"the sha256 of the text": value}) for value in ("ab", "cd"))
    assert "the sha256 of the text=ab" in str(one.differences(other))
    assert "the sha256 of the text=cd" in str(one.differences(other))
    assert one.differences(one) is None


def test_a_modes_own_variables_must_agree_too() -> None:
    environ = {"RUN_MODE": "compress", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    shared = [
        Claim.of(Config.read(environ | {"LAB_RATIO": ratio}), "v1", "10.0.0.2").settings.get("LAB_RATIO")
        for ratio in ("0.5", "0.01")
    ]
    assert shared == ["0.5", None]  # what is the default is not sent


def test_a_rank_that_came_and_asks_no_more_is_given_up_before_all_have_joined() -> None:
    board = RendezvousServer(Claim(0, 3, "dp", "v1", uid="uid0"), "127.0.0.1", 1, "dp-1", window_s=60.0)
    one, other = (Claim(rank, 3, "dp", "v1", uid=f"uid{rank}") for rank in (1, 2))
    board.answer(one, "127.0.0.1", 2, 10.0)
    assert board.silent(12.4, 2.5) == [], "and rank 2 has never come: it is missing, not lost"
    assert board.silent(12.6, 2.5) == [1]
    board.frozen_until = 12.0
    assert board.silent(12.6, 2.5) == [], "rank 0 has not listened itself"
    board.give_up([1], 2.5)
    assert board.refusal == "rank 1 lost before all ranks had joined: no question for 2.5 s"
    assert not board.all_told()
    assert "refuse" in board.answer(other, "127.0.0.1", 3, 12.7)
    assert board.all_told(), "nobody waits for the one that is gone"


KEY, OTHER_KEY = b"k" * 32, b"o" * 32
HERE = "127.0.0.1"
HOST, MEMBER = [Claim(rank, 2, "dp", "v1", uid=f"uid{rank}") for rank in (0, 1)]
QUESTION = {"kind": "claim", "claim": asdict(MEMBER), "knows": 0}


class Office:
    """A desk, and the socket of one who asks."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.dropped = Dropped(self.said.append)
        self.guard = listening_socket(Address("localhost", socket.AF_INET, HERE))
        self.desk = RendezvousSocket(
            RendezvousServer(HOST, HERE, 4000, "dp-1", 60.0),
            udp_socket(socket.AF_INET, HERE),
            KEY,
            self.dropped,
            self.guard,
        )
        self.asker = udp_socket(socket.AF_INET, HERE)
        self.seal = MessageSigner(KEY)
        self.opener = MessageVerifier(KEY, self.seal.sender, Dropped(self.said.append))

    def ask(self, datagram: bytes) -> None:
        send(self.asker, datagram, self.desk.udp.getsockname())
        self.desk.serve()

    def answer(self) -> dict[str, Any] | None:
        """What came back, if anything; None too where it is not believed."""
        try:
            opened = self.opener.open(*self.asker.recvfrom(65536, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return None
        return opened.message if opened is not None else None

    def close(self) -> None:
        for one in (self.desk.udp, self.asker, self.guard):
            one.close()


@pytest.fixture
def office() -> Iterator[Office]:
    one = Office()
    yield one
    one.close()


def test_who_knocks_is_greeted_and_who_then_asks_is_answered(office: Office) -> None:
    office.ask(office.seal.seal(QUESTION, ANYONE))
    greeted = office.answer()
    assert greeted is not None
    assert office.desk.board.missing(0.0) == [1], "a knock may be a recorded one: it lets nobody in"
    office.ask(office.seal.seal(QUESTION, bytes.fromhex(greeted["greet"])))
    assert office.answer() == {"kind": "wait", "wait": ""}
    assert office.dropped.total == 0


def test_a_question_recorded_in_another_run_lets_nobody_in(office: Office) -> None:
    office.ask(office.seal.seal(QUESTION, os.urandom(8)))
    assert office.answer() is None
    assert office.desk.board.missing(0.0) == [1]
    assert office.dropped.by_fault == {"of another run": 1}


def test_one_with_another_key_is_shown_so_and_no_more(office: Office) -> None:
    stranger = MessageSigner(OTHER_KEY)
    office.opener = MessageVerifier(OTHER_KEY, stranger.sender, Dropped(print))
    office.ask(stranger.seal(QUESTION, ANYONE))
    assert office.answer() is None
    assert office.opener.dropped.by_fault == {"sealed with another key": 1}
    for audience in (os.urandom(8), office.desk._seal.sender):  # what answers an answer would never end
        office.ask(MessageSigner(OTHER_KEY).seal(QUESTION, audience))
    office.ask(MessageSigner(OTHER_KEY).seal({}, ANYONE))  # nor is more sent than came
    with pytest.raises(BlockingIOError):
        office.asker.recvfrom(65536, socket.MSG_DONTWAIT)
    assert office.dropped.by_fault == {"sealed with another key": 4}
    assert "is LAB_KEY the same on all ranks" in office.said[0]


def test_connections_are_closed_and_those_that_say_something_counted(office: Office) -> None:
    with socket.create_connection(office.guard.getsockname()) as silent:
        office.desk.serve()
        assert silent.recv(1) == b""
    with socket.create_connection(office.guard.getsockname()) as loud:
        loud.send(b"GET / HTTP/1.1\r\n\r\n")
        office.desk.serve()
    assert office.dropped.by_fault == {"not sealed": 1}


values = st.none() | st.booleans() | st.integers(-9, 12) | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
fields = st.dictionaries(st.sampled_from(sorted(asdict(MEMBER))), values, min_size=1)


@given(st.lists(st.binary(max_size=90) | fields, max_size=8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_without_the_key_or_the_form_changes_nothing(office: Office, come: list[Any]) -> None:
    """Garbage, claims with wrong fields without a seal, and the same by one who has the key."""
    before = office.dropped.total
    count = 0
    for each in come:
        if isinstance(each, bytes):
            datagrams = [each]
        else:
            body = json.dumps({"kind": "claim", "claim": asdict(MEMBER) | each, "knows": 0}).encode()
            datagrams = [body, MessageSigner(OTHER_KEY).seal(json.loads(body), office.desk._seal.sender)]
            if type(each.get("rank", 1)) is not int:  # by one who has the key
                head = MessageSigner(KEY).seal({}, office.desk._seal.sender)[: HEAD.size]
                datagrams.append(head + mac_of(KEY, head + bytes(MAC_BYTES) + body) + body)
        for datagram in datagrams:
            office.ask(datagram)
        count += len(datagrams)
    assert office.dropped.total == before + count
    assert (office.desk.board.refusal, office.desk.board.missing(0.0)) == (None, [1])
