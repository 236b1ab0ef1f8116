"""Lines between processes, here of one process: what is said arrives, ends are told, and strangers are not heard."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from distlab.elastic.peer_connections import ENDED, Address, Lines
from distlab.transport.handshake import Who

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def pair() -> Iterator[tuple[Lines, Lines]]:
    one, other = Lines(0, "127.0.0.1", b"the key"), Lines(1, "127.0.0.1", b"the key")
    one.book = other.book = {rank: Address("127.0.0.1", each.port, 0) for rank, each in enumerate((one, other))}
    assert other.dial([0]) == []
    yield one, other
    one.close()
    other.close()


def heard(lines: Lines) -> tuple[int, int, Any]:
    return lines.heard.get(timeout=5)


def test_what_is_said_arrives_with_who_says_it(pair: tuple[Lines, Lines]) -> None:
    one, other = pair
    other.send(0, {"kind": "a", "long": "x" * 100_000})
    assert heard(one) == (1, other.life, {"kind": "a", "long": "x" * 100_000})
    one.tell([1], {"kind": "b"})
    assert heard(other) == (0, one.life, {"kind": "b"})


def test_the_end_of_a_line_is_told_at_once(pair: tuple[Lines, Lines]) -> None:
    one, other = pair
    life, began = other.life, time.monotonic()
    other.hang_up()
    assert heard(one) == (1, life, {"kind": ENDED})
    assert time.monotonic() - began < 0.5
    assert one.open() == {}


def test_who_comes_back_has_another_life(pair: tuple[Lines, Lines]) -> None:
    one, other = pair
    life = other.life
    other.hang_up()
    assert heard(one) == (1, life, {"kind": ENDED})
    assert other.dial([0]) == []
    other.send(0, {"kind": "again"})
    assert heard(one) == (1, other.life, {"kind": "again"})
    assert other.life != life


def test_two_that_dial_each_other_at_once_lose_no_line(pair: tuple[Lines, Lines]) -> None:
    one, other = pair
    assert one.dial([1]) == []
    one.send(1, {"kind": "a"})
    other.send(0, {"kind": "b"})
    assert heard(other)[2] == {"kind": "a"}
    assert heard(one)[2] == {"kind": "b"}


def test_who_does_not_know_the_secret_is_not_heard(pair: tuple[Lines, Lines]) -> None:
    one, _ = pair
    stranger = Lines(7, "127.0.0.1", b"another")
    stranger.book = one.book
    assert stranger.dial([0]) == [0]
    with socket.create_connection(("127.0.0.1", one.port)) as raw:
        raw.sendall(json.dumps({"rank": 1, "life": 1, "proof": "é"}, ensure_ascii=False).encode() + b"\n[[[\n")
        with suppress(ConnectionResetError):
            assert raw.recv(10) == b""
    assert set(one.open()) == {1}
    stranger.close()


def test_who_hangs_up_while_it_lets_somebody_in_hears_the_next_one(
    pair: tuple[Lines, Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    third = Lines(2, "127.0.0.1", b"the key")
    third.book = one.book
    me = one._door._me
    with monkeypatch.context() as patch:
        hung_up: list[bool] = []

        def hanging_up() -> Who:
            if not hung_up:
                one.hang_up()  # as the main thread does where a rank dies in a drill
            hung_up.append(True)
            return me()

        patch.setattr(one._door, "_me", hanging_up)
        assert third.dial([0]) == []
    assert len(hung_up) > 1, "it dials again"
    third.send(0, {"kind": "again"})
    assert heard(one) == (2, third.life, {"kind": "again"})
    third.close()


def test_who_does_not_answer_is_waited_for_as_long_as_was_said(pair: tuple[Lines, Lines]) -> None:
    slow = socket.create_server(("127.0.0.1", 0))
    _, other = pair
    other.book = other.book | {5: Address("127.0.0.1", slow.getsockname()[1], 0)}
    began = time.monotonic()
    assert other.dial([5], 0.3) == [5]
    assert 0.2 < time.monotonic() - began < 2
    slow.close()
