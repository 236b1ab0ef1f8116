"""The kernel's counters: exact to the byte, for both families, and a clear word where there are none."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from distlab.measure import sockets
from distlab.measure.sockets import Connection, NoDiagnostics


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection; in the last case an IPv4 client of an IPv6 listener, as gloo and the store make
    them."""
    family = socket.AF_INET if request.param == "127.0.0.1" else socket.AF_INET6
    mapped = request.param.startswith("::ffff")
    with socket.create_server(
        ("::", 0) if mapped else (request.param, 0), family=family, dualstack_ipv6=mapped
    ) as listener:
        client = socket.create_connection((request.param.removeprefix("::ffff:"), listener.getsockname()[1]))
        server, _ = listener.accept()
        with client, server:
            yield client, server


def connection_of(end: socket.socket) -> Connection:
    return sockets.connections()[os.fstat(end.fileno()).st_ino]


def test_each_end_counts_what_it_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    assert connection_of(client).sent_bytes == 0
    client.sendall(b"x" * 100_000)
    server.sendall(b"y" * 7)
    assert connection_of(client).sent_bytes == 100_000
    assert connection_of(server).sent_bytes == 7
    client.sendall(b"x")
    assert connection_of(client).sent_bytes == 100_001


def test_bytes_that_still_wait_in_the_send_buffer_count(pair: tuple[socket.socket, socket.socket]) -> None:
    client, _ = pair
    client.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += client.send(b"z" * 100_000)  # nobody reads: the buffers of both ends fill up
    assert connection_of(client).sent_bytes == sent


def test_both_ends_name_each_other(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = (connection_of(end) for end in pair)
    assert client.remote == server.local
    assert server.remote == client.local
    assert client.local[0] in ("127.0.0.1", "::1")  # never ::ffff:127.0.0.1


def test_only_this_process_is_counted(pair: tuple[socket.socket, socket.socket]) -> None:
    client, _ = pair
    inode = os.fstat(client.fileno()).st_ino
    assert inode in sockets.connections()
    client.close()
    assert inode not in sockets.connections()


def refused(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_kernel_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "send", refused)
    with pytest.raises(NoDiagnostics, match=r"wire bytes are not measured.*Operation not permitted"):
        sockets.connections()


def test_a_system_without_netlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_NETLINK")
    with pytest.raises(NoDiagnostics, match="no TCP socket diagnostics"):
        sockets.connections()
