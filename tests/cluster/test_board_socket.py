"""The board's socket: who has the key is answered, and all else is dropped, counted and changes nothing."""

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distlab.cluster.address import Address
from distlab.cluster.authenticated_messages import Dropped, MessageVerifier
from distlab.cluster.message_signer import ANYONE, HEAD, MAC_BYTES, MessageSigner, mac_of
from distlab.cluster.rendezvous_server import (
    Claim,
    RendezvousServer,
    RendezvousSocket,
    listening_socket,
    send,
    udp_socket,
)

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
