"""A socket that has got the number of another one is not taken for it."""

import os
import socket

import pytest

from distlab.techniques.elastic.process_group import shut_down, sockets

pytestmark = pytest.mark.timeout(30)


def test_a_number_that_is_given_again_is_another_socket() -> None:
    first, other = socket.socketpair()
    before = sockets()
    number = first.detach()
    os.close(number)
    second = socket.socket()
    assert second.fileno() == number
    assert [each.descriptor for each in sockets() - before] == [number]
    second.close()
    other.close()


def test_what_is_shut_down_has_ended_for_both_sides() -> None:
    here, there = socket.socketpair()
    with here, there:
        shut_down(here.fileno())
        assert (here.recv(1), there.recv(1)) == (b"", b"")


def test_one_that_listens_and_one_that_is_closed_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        shut_down(server.fileno())
        with socket.create_connection(server.getsockname()):
            pass
        closed = server.fileno()
    shut_down(closed)
