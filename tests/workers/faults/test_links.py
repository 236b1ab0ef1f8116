"""The kernel drops what comes to a socket, or lets it send slowly, and no privilege is asked for."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from workers.faults import links

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


def udp() -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.bind(("127.0.0.1", 0))
    found.settimeout(WAIT_S)
    return found


def test_what_comes_is_dropped_and_comes_again_once_the_cut_ends(connected: Pair) -> None:
    near, far = connected
    links.attach(far, links.ALL)
    near.sendall(b"word")
    with pytest.raises(TimeoutError):
        far.recv(4)
    links._detach(far)
    far.settimeout(10)
    assert far.recv(4) == b"word"


def test_all_sockets_of_the_process_are_found(connected: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = connected
    inodes = {each.getsockname() for each in links._own()}
    assert {near.getsockname(), far.getsockname()} <= inodes
    monkeypatch.setattr(links, "_own", lambda: iter(connected))  # not those of this test's pool
    undo = links.hear_nobody()
    near.sendall(b"1")
    with pytest.raises(TimeoutError):
        far.recv(1)
    undo()
    far.settimeout(10)
    assert far.recv(1) == b"1"


def test_of_two_that_send_datagrams_one_is_dropped() -> None:
    with udp() as post, udp() as cut, udp() as other:
        undo = links.deafen_to(post, cut.getsockname())
        cut.sendto(b"cut", post.getsockname())
        other.sendto(b"other", post.getsockname())
        assert post.recv(10) == b"other"
        with pytest.raises(TimeoutError):
            post.recv(10)
        undo()
        cut.sendto(b"again", post.getsockname())
        assert post.recv(10) == b"again"


def test_the_same_port_of_another_host_is_heard() -> None:
    with udp() as post, udp() as other:
        links.deafen_to(post, ("10.9.8.7", other.getsockname()[1]))
        other.sendto(b"other", post.getsockname())
        assert post.recv(10) == b"other"


def test_a_slow_link_takes_its_time(connected: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = connected
    monkeypatch.setattr(links, "_own", lambda: iter([near]))
    links.set_pace(1_000_000)
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
    links._detach(connected[0])
