"""Who gets a connection: every two ranks one, a stranger none, and who is missing is named."""

import socket
import threading
import time

import pytest
import torch.distributed as dist

from distlab.transport.process_group import TcpBackend
from distlab.transport.tcp import Channel, LinkError
from tests.transport.linked import on_threads
from tests.transport.strangers import FORGED, HERE, silent, told

pytestmark = pytest.mark.timeout(60)
KEY = b"the key"


def connected(store: dist.Store, own: int, others: list[int], bound_s: float = 5.0) -> dict[int, socket.socket]:
    return TcpBackend(HERE, KEY).connect(store, own, others, bound_s)


def port_of(store: dist.Store, rank: int) -> int:
    store.wait([f"tcp/{rank}"])
    return int(store.get(f"tcp/{rank}").decode().split()[1])


def test_every_two_ranks_have_one_connection() -> None:
    assert on_threads(4, lambda channel: channel.transport.ranks) == [{0, 1, 2, 3} - {rank} for rank in range(4)]


def test_who_does_not_come_is_named_within_the_bound() -> None:
    began = time.monotonic()
    with pytest.raises(LinkError, match="no connection from rank 1, 2: it did not dial"):
        connected(dist.HashStore(), 0, [1, 2], 0.3)
    with pytest.raises(LinkError, match="no connection to rank 0"):
        connected(dist.HashStore(), 1, [0], 0.3)
    assert time.monotonic() - began < 5


def test_200_silent_connections_are_waited_for_no_longer_than_the_bound() -> None:
    """Each took a second of its own once: at 12 s, of a bound of 2, nobody was named, nor at 52."""
    store = dist.HashStore()

    def intrude() -> None:
        with silent(port_of(store, 0), 200):
            ended.wait(30)

    ended = threading.Event()
    stranger = threading.Thread(target=intrude)
    stranger.start()
    began = time.monotonic()
    with pytest.raises(LinkError, match="no connection from rank 1: it did not dial"):
        connected(store, 0, [1], 2.0)
    assert time.monotonic() - began < 4
    ended.set()
    stranger.join(5)


@pytest.mark.parametrize("said", FORGED.values(), ids=FORGED)
def test_a_stranger_is_not_listened_to(said: bytes) -> None:
    """Though it knows what stands in the store, which was once enough to be taken for rank 1."""
    store = dist.HashStore()

    def intrude() -> None:
        told(port_of(store, 0), said)
        intruded.set()

    def be_rank() -> None:
        intruded.wait(20)
        found.update(connected(store, 1, [0]))

    intruded = threading.Event()
    found: dict[int, socket.socket] = {}
    threads = [threading.Thread(target=each) for each in (intrude, be_rank)]
    for each in threads:
        each.start()
    connections = connected(store, 0, [1])
    for each in threads:
        each.join(5)
    connections[1].sendall(b"it is you")
    assert found[0].recv(9, socket.MSG_WAITALL) == b"it is you"
    for connection in (connections[1], found[0]):
        connection.close()


def test_a_stranger_that_listens_in_a_rank_s_place_is_not_believed() -> None:
    store = dist.HashStore()
    with socket.create_server((HERE, 0)) as listening:
        store.set("tcp/0", f"{HERE} {listening.getsockname()[1]}")

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"x" * 200)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(LinkError, match="no connection to rank 0: it does not have the key of this run"):
            connected(store, 1, [0], 2.0)


def test_a_key_is_of_one_channel_and_tag() -> None:
    def run(channel: Channel) -> int:
        keys = [
            Channel(channel.transport, channel.ranks, channel.rank, name)._key(tag)
            for name in ("a", "b")
            for tag in (-5, 0, 5)
        ]
        return len(set(keys))

    assert on_threads(1, run) == [6]
