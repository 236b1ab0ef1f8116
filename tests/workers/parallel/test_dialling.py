"""Who gets a connection: every two ranks one, a stranger none, and who is missing is named."""

import socket
import threading
import time

import pytest
import torch.distributed as dist

from tests.workers.parallel.linked import on_threads
from workers.parallel.channel import Channel
from workers.parallel.dialling import HELLO, SECRET_BYTES, connect
from workers.parallel.transport import LinkError

pytestmark = pytest.mark.timeout(60)


def test_every_two_ranks_have_one_connection() -> None:
    assert on_threads(4, lambda channel: channel.transport.ranks) == [{0, 1, 2, 3} - {rank} for rank in range(4)]


def test_who_does_not_come_is_named_within_the_bound() -> None:
    began = time.monotonic()
    with pytest.raises(LinkError, match="no connection from rank 1, 2: it did not dial"):
        connect(dist.HashStore(), "127.0.0.1", 0, [1, 2], 0.3)
    with pytest.raises(LinkError, match="no connection to rank 0"):
        connect(dist.HashStore(), "127.0.0.1", 1, [0], 0.3)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("hello", [HELLO.pack(b"x" * SECRET_BYTES, 1), b"GET / HTTP/1.1\r\n\r\n", b""])
def test_a_stranger_is_not_listened_to(hello: bytes) -> None:
    store = dist.HashStore()

    def intrude() -> None:
        store.wait(["tcp/0"])
        host, port = store.get("tcp/0").decode().split()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(hello)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    def be_rank() -> None:
        store.wait(["intruded"])
        found.update(connect(store, "127.0.0.1", 1, [0], 5))

    found: dict[int, socket.socket] = {}
    stranger, rank = threading.Thread(target=intrude), threading.Thread(target=be_rank)
    stranger.start()
    rank.start()
    threading.Timer(0.2, store.set, ("intruded", "1")).start()
    connections = connect(store, "127.0.0.1", 0, [1], 5)
    stranger.join(5)
    rank.join(5)
    connections[1].sendall(b"it is you")
    assert found[0].recv(9, socket.MSG_WAITALL) == b"it is you"
    for connection in (connections[1], found[0]):
        connection.close()


def test_a_key_is_of_one_channel_and_tag() -> None:
    def run(channel: Channel) -> int:
        keys = [
            Channel(channel.transport, channel.ranks, channel.rank, name)._key(tag)
            for name in ("a", "b")
            for tag in (-5, 0, 5)
        ]
        return len(set(keys))

    assert on_threads(1, run) == [6]
