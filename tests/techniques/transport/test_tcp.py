"""Messages over plain TCP: each arrives in its receive, in any pieces and order, or raises an error within the timeout."""

import socket
import time
from collections.abc import Iterator

import pytest
import torch

from distlab.techniques.transport.tcp import HEAD, Channel, LinkError, Message, Stream
from tests.techniques.transport.linked import on_threads

A, B = b"a".ljust(16), b"b".ljust(16)


def wait(message: Message) -> None:
    """Fail: these tests call no wait."""
    raise AssertionError(f"waited for {message}")


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a connection."""
    here, there = socket.socketpair()
    with here, there:
        yield Stream(wait, 1, here), Stream(wait, 0, there)


def read_all(stream: Stream) -> None:
    """Read until nothing is left."""
    while True:
        try:
            stream.read()
        except BlockingIOError:
            return


def test_messages_of_a_key_arrive_in_order(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    for key, value in ((A, 1.0), (B, 2.0), (A, 3.0)):
        assert here.send(key, torch.full((3,), value)).done
    places = [torch.zeros(3) for _ in range(3)]
    messages = [there.receive(key, place) for key, place in zip((B, A, A), places, strict=True)]
    read_all(there)
    assert [message.done for message in messages] == [True] * 3
    assert [place.tolist() for place in places] == [[2.0] * 3, [1.0] * 3, [3.0] * 3]


def test_an_early_message_is_stored_and_later_ones_are_read(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    here.send(A, torch.arange(20_000))  # longer than what is read at a time
    here.send(B, torch.ones(1))
    place = torch.zeros(1)
    behind = there.receive(B, place)
    read_all(there)
    assert behind.done
    assert place.item() == 1
    late = torch.zeros(20_000, dtype=torch.int64)
    assert there.receive(A, late).done
    assert torch.equal(late, torch.arange(20_000))


def test_a_receive_posted_while_its_message_arrives_gets_a_copy(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    numbers = torch.arange(20_000)
    whole = HEAD.pack(A, numbers.nbytes) + numbers.numpy().tobytes()
    here.connection.sendall(whole[:9_000])
    read_all(there)
    place = torch.zeros_like(numbers)
    message = there.receive(A, place)
    assert not message.done
    here.connection.sendall(whole[9_000:])
    read_all(there)
    assert message.done
    assert torch.equal(place, numbers)


@pytest.mark.parametrize("piece", [1, 7, 23, 25])
def test_a_header_may_arrive_in_pieces(ends: tuple[Stream, Stream], piece: int) -> None:
    here, there = ends
    place = torch.zeros(2)
    message = there.receive(A, place)
    data = HEAD.pack(A, 8) + torch.tensor([1.0, 2.0]).numpy().tobytes()
    for first in range(0, len(data), piece):
        here.connection.sendall(data[first : first + piece])
        read_all(there)
    assert message.done
    assert place.tolist() == [1.0, 2.0]


def test_data_that_the_kernel_does_not_accept_is_sent_later_in_order(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    large, small = torch.arange(1_000_000), torch.ones(1)
    first, second = here.send(A, large), here.send(B, small)
    assert not first.done
    assert not second.done
    places = torch.zeros_like(large), torch.zeros(1)
    messages = there.receive(A, places[0]), there.receive(B, places[1])
    while here.outgoing:
        read_all(there)
        here.write()
    read_all(there)
    assert all(message.done for message in (first, second, *messages))
    assert torch.equal(places[0], large)
    assert places[1].item() == 1


@pytest.mark.parametrize("early", [True, False])
def test_a_wrong_size_is_an_error(ends: tuple[Stream, Stream], early: bool) -> None:
    here, there = ends
    if early:
        here.send(A, torch.zeros(3))
        read_all(there)
        with pytest.raises(OSError, match="it sent 12 bytes, this rank expected 8"):
            there.receive(A, torch.zeros(2))
        return
    there.receive(A, torch.zeros(2))
    here.send(A, torch.zeros(3))
    with pytest.raises(OSError, match="it sent 12 bytes, this rank expected 8"):
        read_all(there)


def test_a_closed_connection_is_an_error(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    here.connection.close()
    with pytest.raises(ConnectionResetError):
        there.read()


def test_a_tensor_that_was_sent_can_still_be_resized(ends: tuple[Stream, Stream]) -> None:
    here, _ = ends
    tensor = torch.zeros(4)
    here.send(A, tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


LARGE = 4_000_003  # numbers: more than the kernel buffers of both ends hold


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_send_before_anybody_receives(world_size: int) -> None:
    def run(channel: Channel) -> list[float]:
        others = [rank for rank in channel.ranks if rank != channel.rank]
        sent = [channel.send([torch.full((LARGE,), float(channel.rank))], peer, 0) for peer in others]
        places = [torch.empty(LARGE) for _ in others]
        for message in [channel.recv([place], peer, 0) for peer, place in zip(others, places, strict=True)]:
            message.wait()
        for message in sent:
            message.wait()
        return [float(place.mean()) for place in places]

    wanted = [[float(peer) for peer in range(world_size) if peer != rank] for rank in range(world_size)]
    assert on_threads(world_size, run, 30) == wanted


def test_ranks_wait_for_their_messages_in_opposite_orders() -> None:
    def run(channel: Channel) -> list[float]:
        tags = (1, 2) if channel.rank else (2, 1)
        sent = {tag: channel.send([torch.full((LARGE,), float(tag))], 1 - channel.rank, tag) for tag in tags}
        places = {tag: torch.empty(LARGE) for tag in (1, 2)}
        arriving = {tag: channel.recv([place], 1 - channel.rank, tag) for tag, place in places.items()}
        for tag in tags:
            sent[tag].wait()
            arriving[tag].wait()
        return [float(place[-1]) for place in places.values()]

    assert on_threads(2, run, 30) == [[1.0, 2.0]] * 2


def test_two_channels_share_a_connection_and_not_their_messages() -> None:
    def run(channel: Channel) -> float:
        other = Channel(channel.transport, channel.ranks, channel.rank, "other")
        for each, value in ((channel, 1.0), (other, 2.0)):
            each.send([torch.tensor([value])], 1 - channel.rank, 0)
        place = torch.zeros(1)
        other.recv([place], 1 - channel.rank, 0).wait()
        return place.item()

    assert on_threads(2, run) == [2.0, 2.0]


def test_a_rank_that_leaves_is_named_at_once() -> None:
    def run(channel: Channel) -> float:
        if channel.rank == 1:
            return 0.0
        began = time.monotonic()
        with pytest.raises(LinkError, match="the connection to rank 1 has ended"):
            channel.recv([torch.zeros(1)], 1 - channel.rank, 0).wait()
        return time.monotonic() - began

    first, second = on_threads(2, run, 20)
    assert first < 10
    assert second == 0


def test_a_silent_rank_is_named_after_the_timeout() -> None:
    def run(channel: Channel) -> float:
        began = time.monotonic()
        if channel.rank:
            time.sleep(1.5)
            return 0.0
        with pytest.raises(LinkError, match=r"a message to or from rank 1 was not complete in 0\.5 s"):
            channel.recv([torch.zeros(1)], 1 - channel.rank, 0).wait()
        return time.monotonic() - began

    waited_s, _ = on_threads(2, run, 0.5)
    assert 0.5 <= waited_s < 1.5


def test_an_error_of_sizes_names_the_rank() -> None:
    def run(channel: Channel) -> str:
        channel.send([torch.zeros(3 + channel.rank)], 1 - channel.rank, 0)
        with pytest.raises(LinkError) as caught:
            channel.recv([torch.zeros(3 + channel.rank)], 1 - channel.rank, 0).wait()
        return str(caught.value)

    first, _ = on_threads(2, run)
    assert first.startswith("the connection to rank 1 has ended: it sent 16 bytes, this rank expected 12")


def test_outgoing_data_is_sent_before_the_end() -> None:
    def run(channel: Channel) -> float:
        if channel.rank:
            channel.send([torch.ones(LARGE)], 0, 0)
            return 0.0
        time.sleep(0.3)
        place = torch.zeros(LARGE)
        channel.recv([place], 1, 0).wait()
        return float(place.sum())

    assert on_threads(2, run, 30)[0] == LARGE
