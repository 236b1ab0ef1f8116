"""The kernel drops what comes to a socket, or lets it send slowly, and no privilege is asked for."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from distlab.faults import injectors

pytestmark = pytest.mark.timeout(60)
WAIT_S = 0.3
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def connected() -> Iterator[Pair]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            far.settimeout(WAIT_S)
            near.settimeout(WAIT_S)
            yield near, far


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The sockets that count as this process's, and not those of the pool of ranks."""
    found: list[socket.socket] = []
    monkeypatch.setattr(injectors, "_own", lambda: iter(found))
    return found


def udp() -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.bind(("127.0.0.1", 0))
    found.settimeout(WAIT_S)
    return found


def test_all_sockets_of_the_process_are_found(connected: Pair) -> None:
    assert {each.getsockname() for each in connected} <= {each.getsockname() for each in injectors._own()}


def test_what_comes_is_dropped_and_comes_again_once_the_cut_ends(connected: Pair, own: list[socket.socket]) -> None:
    near, far = connected
    own.append(far)
    whole = injectors.hear_nobody()
    near.sendall(b"word")
    if whole:  # as root, or before Linux 6.15
        with pytest.raises(TimeoutError):
            far.recv(4)
    injectors.hear_again()
    far.settimeout(10)
    assert far.recv(4) == b"word"


def test_where_tcp_takes_a_privilege_datagrams_are_dropped_alone(
    connected: Pair, own: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = injectors.attach

    def refused(each: socket.socket, instructions: injectors.Instructions) -> None:
        if each.type == socket.SOCK_STREAM:
            raise PermissionError
        attach(each, instructions)

    monkeypatch.setattr(injectors, "attach", refused)
    with udp() as post, udp() as other:
        own += [connected[1], post]
        assert injectors.hear_nobody() is False
        other.sendto(b"word", post.getsockname())
        with pytest.raises(TimeoutError):
            post.recv(4)
        connected[0].sendall(b"word")
        assert connected[1].recv(4) == b"word"


def test_of_two_that_send_datagrams_one_is_dropped() -> None:
    with udp() as post, udp() as cut, udp() as other:
        injectors.deafen_to(post, [cut.getsockname()])
        cut.sendto(b"cut", post.getsockname())
        other.sendto(b"other", post.getsockname())
        assert post.recv(10) == b"other"
        with pytest.raises(TimeoutError):
            post.recv(10)
        injectors.deafen_to(post, [])
        cut.sendto(b"again", post.getsockname())
        assert post.recv(10) == b"again"


def test_of_three_that_send_datagrams_two_are_dropped() -> None:
    with udp() as post, udp() as one, udp() as two, udp() as other:
        injectors.deafen_to(post, [("::1", one.getsockname()[1]), two.getsockname()])
        for each, words in ((one, b"one"), (two, b"two"), (other, b"other")):
            each.sendto(words, post.getsockname())
        assert post.recv(10) == b"other"
        with pytest.raises(TimeoutError):
            post.recv(10)


def test_the_same_port_of_another_host_is_heard() -> None:
    with udp() as post, udp() as other:
        injectors.deafen_to(post, [("10.9.8.7", other.getsockname()[1])])
        other.sendto(b"other", post.getsockname())
        assert post.recv(10) == b"other"


def test_a_slow_link_takes_its_time(connected: Pair, own: list[socket.socket]) -> None:
    near, far = connected
    own.append(near)
    injectors.set_pace(1_000_000)
    near.settimeout(30)
    far.settimeout(30)
    began = time.monotonic()
    sender = threading.Thread(target=near.sendall, args=(bytes(1_500_000),))
    sender.start()
    left = 1_500_000
    while left:
        left -= len(far.recv(1 << 20))
    sender.join()
    assert time.monotonic() - began > 0.7  # 1.5 s at that rate, less what TCP begins with; else some milliseconds


def test_taking_away_what_is_not_there_does_nothing(connected: Pair) -> None:
    injectors._detach(connected[0])
