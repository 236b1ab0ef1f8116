"""Both ends prove the key: ranks are accepted whatever strangers do meanwhile, and no bytes end the listener."""

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
    MAX_UNVERIFIED,
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
from tests.techniques.transport.strangers import FORGED, HERE, answer_to, answers_to_forged, silent

pytestmark = pytest.mark.timeout(60)
ANSWER_BYTES = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
KEY, PURPOSE, RANK = b"the key", "a test", Who(1, 2)


class ListenerThread:
    """A listener on its own thread: the accepted processes, and the faults of rejected connections."""

    def __init__(self) -> None:
        self.accepted: list[Who] = []
        self.faults: list[str] = []
        listening, self._selector = listen(HERE), selectors.DefaultSelector()
        self.port = int(listening.getsockname()[1])
        self.listener = Listener(
            listening, self._selector, KEY, PURPOSE, lambda: Who(7, 3), lambda fault, source: self.faults.append(fault)
        )
        self._closed = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.05):
                found = self.listener.step(key)
                if found is not None:
                    self.accepted.append(found[0])
            self.listener.expire()
        self.listener.close()

    def close(self) -> None:
        self._closed = True
        self.thread.join(5)


@contextmanager
def listening_thread() -> Iterator[ListenerThread]:
    listener = ListenerThread()
    try:
        yield listener
        assert listener.thread.is_alive(), "the listener thread has ended"
    finally:
        listener.close()


def dial(port: int, me: Who = RANK, key: bytes = KEY, purpose: str = PURPOSE, bound_s: float = 5.0) -> Who:
    connection, who = dialled(HERE, port, key, purpose, me, time.monotonic() + bound_s)
    connection.close()
    return who


def test_each_end_knows_who_the_other_is() -> None:
    with listening_thread() as listener:
        assert dial(listener.port) == Who(7, 3)
        while not listener.accepted:  # the dialler may return first
            time.sleep(0.01)
        assert listener.accepted == [RANK]


def test_another_key_or_another_purpose_is_an_error_for_the_dialler() -> None:
    with listening_thread() as listener:
        with pytest.raises(Unproven, match="does not have the key"):
            dial(listener.port, key=b"another")
        with pytest.raises(Unproven, match="does not have the key"):
            dial(listener.port, purpose="another port")
        assert listener.accepted == []


def test_forged_messages_are_rejected_and_counted() -> None:
    with listening_thread() as listener:
        answers = answers_to_forged(listener.port)
        assert listener.accepted == []
        assert all(ACCEPTED not in answer[ANSWER_BYTES:] for answer in answers.values())
        assert len(listener.faults) == len(FORGED) - 1, "all except the silent one, which may only have probed the port"
        assert dial(listener.port) == Who(7, 3)


def test_a_proof_from_another_connection_is_rejected() -> None:
    """Both a replayed proof, and the listener's own proof sent back to it."""
    with listening_thread() as listener:
        nonce = bytes(NONCE_BYTES)
        with socket.create_connection((HERE, listener.port)) as first:
            first.sendall(MAGIC + nonce)
            answer = first.recv(ANSWER_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
            right = proof(KEY, b"dialler", PURPOSE, nonce + answer[:NONCE_BYTES], Who(1))
            first.sendall(right)
            assert first.recv(1) == ACCEPTED
        for data in (right, answer[NONCE_BYTES:]):
            assert answer_to(listener.port, MAGIC + nonce + data)[ANSWER_BYTES:] == b""
        assert listener.accepted == [Who(1)]


def test_200_silent_connections_block_nobody() -> None:
    with listening_thread() as listener, silent(listener.port, 200):
        began = time.monotonic()
        for rank in range(5):
            assert dial(listener.port, Who(rank)) == Who(7, 3)
        assert time.monotonic() - began < 5
        assert len(listener.listener.sockets()) <= MAX_UNVERIFIED + 1


def test_silence_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROVE_S", 0.2)
    with listening_thread() as listener, socket.create_connection((HERE, listener.port)) as connection:
        connection.settimeout(5)
        assert connection.recv(1) == b""
        assert listener.faults == ["that did not prove the key"]


def test_a_rejected_connection_is_counted_before_it_is_closed() -> None:
    """Otherwise a test that waits for the end of the connection would read the old count."""
    with selectors.DefaultSelector() as selector:
        seen: list[str] = []

        def count(fault: str, _source: tuple[str, int]) -> None:
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            seen.append(fault)

        listener = Listener(listen(HERE), selector, KEY, PURPOSE, on_rejected=count)
        with socket.create_connection(listener.sockets()[0].getsockname()) as connection:
            connection.setblocking(False)
            connection.sendall(b"x" * HELLO_BYTES)
            while not seen:
                for key, _ in selector.select(0.05):
                    listener.step(key)
        listener.close()


def test_a_listener_without_the_key_is_rejected() -> None:
    for data in (b"", b"x" * 600, *FORGED.values()):
        with listen(HERE) as listening:
            port = int(listening.getsockname()[1])

            def answer(data: bytes = data, listening: socket.socket = listening) -> None:
                with suppress(OSError):
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(HELLO_BYTES)
                        connection.sendall(data)

            threading.Thread(target=answer, daemon=True).start()
            with socket.create_connection((HERE, port)) as connection, pytest.raises(OSError):  # noqa: PT011
                prove(connection, KEY, PURPOSE, Who(1), 2.0)


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=200) | st.sampled_from(sorted(FORGED.values(), key=len)[:-1]), max_size=4))
def test_no_bytes_end_a_listener(parts: list[bytes]) -> None:
    """Without a thread, so that an error is raised here."""
    with selectors.DefaultSelector() as selector:
        listener = Listener(listen(HERE), selector, KEY, PURPOSE)
        with socket.create_connection(listener.sockets()[0].getsockname()) as connection:
            for part in (*parts, None):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR) if part is None else connection.sendall(part)
                for key, _ in selector.select(0.01):
                    assert listener.step(key) is None
        listener.close()


def test_closed_is_a_kind_of_unproven() -> None:
    assert issubclass(Closed, Unproven)
