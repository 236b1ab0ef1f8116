"""Both ends prove the key: who has it gets in whatever strangers do meanwhile, and no bytes end who reads them."""

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.techniques.transport import handshake
from distlab.techniques.transport.handshake import (
    ACCEPTED,
    HELLO_BYTES,
    MAGIC,
    MOST,
    NONCE_BYTES,
    PROOF_BYTES,
    Closed,
    Listener,
    Unproven,
    Who,
    dialled,
    listen,
    proof,
    prove,
)
from tests.techniques.transport.strangers import FORGED, HERE, silent, told, told_all

pytestmark = pytest.mark.timeout(60)
ANSWER_BYTES = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
KEY, PURPOSE, RANK = b"the key", "a test", Who(1, 2)


class ListenerThread:
    """A door on a thread of its own; who came, and what was wrong with those that did not."""

    def __init__(self) -> None:
        self.come: list[Who] = []
        self.faults: list[str] = []
        listening, self._selector = listen(HERE), selectors.DefaultSelector()
        self.port = int(listening.getsockname()[1])
        self.door = Listener(
            listening, self._selector, KEY, PURPOSE, lambda: Who(7, 3), lambda fault, source: self.faults.append(fault)
        )
        self._closed = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.05):
                found = self.door.step(key)
                if found is not None:
                    self.come.append(found[0])
            self.door.expire()
        self.door.close()

    def close(self) -> None:
        self._closed = True
        self.thread.join(5)


@contextmanager
def kept() -> Iterator[ListenerThread]:
    listener = ListenerThread()
    try:
        yield listener
        assert listener.thread.is_alive(), "nothing that it read has ended it"
    finally:
        listener.close()


def dial(port: int, me: Who = RANK, key: bytes = KEY, purpose: str = PURPOSE, bound_s: float = 5.0) -> Who:
    connection, who = dialled(HERE, port, key, purpose, me, time.monotonic() + bound_s)
    connection.close()
    return who


def test_each_end_knows_who_the_other_is() -> None:
    with kept() as listener:
        assert dial(listener.port) == Who(7, 3)
        while not listener.come:  # it notes who came once it has let them in
            time.sleep(0.01)
        assert listener.come == [RANK]


def test_who_has_another_key_or_means_another_port_finds_that_out() -> None:
    with kept() as listener:
        with pytest.raises(Unproven, match="does not have the key"):
            dial(listener.port, key=b"another")
        with pytest.raises(Unproven, match="does not have the key"):
            dial(listener.port, purpose="another port")
        assert listener.come == []


def test_what_is_forged_lets_nobody_in_and_is_counted() -> None:
    with kept() as listener:
        answers = told_all(listener.port)
        assert listener.come == []
        assert all(ACCEPTED not in answer[ANSWER_BYTES:] for answer in answers.values())
        assert len(listener.faults) == len(FORGED) - 1, "all but who said nothing, who may only have looked"
        assert dial(listener.port) == Who(7, 3)


def test_what_was_heard_on_another_connection_proves_nothing() -> None:
    """Neither replayed to the same port, nor the listener's own proof sent back to it."""
    with kept() as listener:
        nonce = bytes(NONCE_BYTES)
        with socket.create_connection((HERE, listener.port)) as first:
            first.sendall(MAGIC + nonce)
            answer = first.recv(ANSWER_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
            right = proof(KEY, b"dialler", PURPOSE, nonce + answer[:NONCE_BYTES], Who(1))
            first.sendall(right)
            assert first.recv(1) == ACCEPTED
        for said in (right, answer[NONCE_BYTES:]):
            assert told(listener.port, MAGIC + nonce + said)[ANSWER_BYTES:] == b""
        assert listener.come == [Who(1)]


def test_200_silent_connections_hold_up_nobody() -> None:
    with kept() as listener, silent(listener.port, 200):
        began = time.monotonic()
        for rank in range(5):
            assert dial(listener.port, Who(rank)) == Who(7, 3)
        assert time.monotonic() - began < 5
        assert len(listener.door.sockets()) <= MOST + 1


def test_silence_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROVE_S", 0.2)
    with kept() as listener, socket.create_connection((HERE, listener.port)) as connection:
        connection.settimeout(5)
        assert connection.recv(1) == b""
        assert listener.faults == ["that proves nothing"]


def test_who_is_turned_away_is_counted_before_it_sees_so() -> None:
    """Or a reader of the count who waited for the end of the connection would find one too few."""
    with selectors.DefaultSelector() as selector:
        seen: list[str] = []

        def look(fault: str, _source: tuple[str, int]) -> None:
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            seen.append(fault)

        door = Listener(listen(HERE), selector, KEY, PURPOSE, turned_away=look)
        with socket.create_connection(door.sockets()[0].getsockname()) as connection:
            connection.setblocking(False)
            connection.sendall(b"x" * HELLO_BYTES)
            while not seen:
                for key, _ in selector.select(0.05):
                    door.step(key)
        door.close()


def test_a_listener_that_says_anything_is_not_believed() -> None:
    for said in (b"", b"x" * 600, *FORGED.values()):
        with listen(HERE) as listening:
            port = int(listening.getsockname()[1])

            def answer(words: bytes = said, listening: socket.socket = listening) -> None:
                with suppress(OSError):
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(HELLO_BYTES)
                        connection.sendall(words)

            threading.Thread(target=answer, daemon=True).start()
            with socket.create_connection((HERE, port)) as connection, pytest.raises(OSError):  # noqa: PT011
                prove(connection, KEY, PURPOSE, Who(1), 2.0)


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=200) | st.sampled_from(sorted(FORGED.values(), key=len)[:-1]), max_size=4))
def test_no_bytes_end_a_door(parts: list[bytes]) -> None:
    """Without a thread: what ended it would be raised here."""
    with selectors.DefaultSelector() as selector:
        door = Listener(listen(HERE), selector, KEY, PURPOSE)
        with socket.create_connection(door.sockets()[0].getsockname()) as connection:
            for part in (*parts, None):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR) if part is None else connection.sendall(part)
                for key, _ in selector.select(0.01):
                    assert door.step(key) is None
        door.close()


def test_who_hangs_up_while_it_is_proven_is_told_apart_from_a_stranger() -> None:
    assert issubclass(Closed, Unproven)
