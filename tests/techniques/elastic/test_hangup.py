"""Open sockets are identified by inode, and shutting one down ends it for both sides."""

import os
import socket

import pytest

from distlab.techniques.elastic.process_group import shut_down, sockets

pytestmark = pytest.mark.timeout(30)


def test_a_reused_descriptor_is_another_socket() -> None:
    first, other = socket.socketpair()
    before = sockets()
    number = first.detach()
    os.close(number)
    second = socket.socket()
    assert second.fileno() == number
    assert [each.descriptor for each in sockets() - before] == [number]
    second.close()
    other.close()


def test_a_shut_down_socket_has_ended_for_both_sides() -> None:
    here, there = socket.socketpair()
    with here, there:
        shut_down(here.fileno())
        assert (here.recv(1), there.recv(1)) == (b"", b"")


def test_listening_and_closed_sockets_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        shut_down(server.fileno())
        with socket.create_connection(server.getsockname()):
            pass
        closed = server.fileno()
    shut_down(closed)
