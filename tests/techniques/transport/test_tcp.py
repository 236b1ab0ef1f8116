"""Messages over plain TCP: who gets which of one connection, in whatever pieces and order they come, and never later than
the bound."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from distlab.techniques.transport.tcp import HEAD, Channel, LinkError, Message, Stream
from tests.techniques.transport.linked import on_threads

A, B = b"a".ljust(16), b"b".ljust(16)


def wait(message: Message) -> None:
    """It is never asked."""
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
            stream.read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return


def test_messages_come_to_their_keys_in_the_order_of_each(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    for key, value in ((A, 1.0), (B, 2.0), (A, 3.0)):
        assert here.send(key, torch.full((3,), value)).done
    places = [torch.zeros(3) for _ in range(3)]
    messages = [there.receive(key, place) for key, place in zip((B, A, A), places, strict=True)]
    read_all(there)
    assert [message.done for message in messages] == [True] * 3
    assert [place.tolist() for place in places] == [[2.0] * 3, [1.0] * 3, [3.0] * 3]


def test_what_comes_early_is_kept_and_what_lies_behind_it_is_read(ends: tuple[Stream, Stream]) -> None:
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


def test_a_receive_that_is_posted_while_its_message_comes_gets_a_copy(ends: tuple[Stream, Stream]) -> None:
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
def test_a_head_may_come_in_pieces(ends: tuple[Stream, Stream], piece: int) -> None:
    here, there = ends
    place = torch.zeros(2)
    message = there.receive(A, place)
    data = HEAD.pack(A, 8) + torch.tensor([1.0, 2.0]).numpy().tobytes()
    for first in range(0, len(data), piece):
        here.connection.sendall(data[first : first + piece])
        read_all(there)
    assert message.done
    assert place.tolist() == [1.0, 2.0]


def test_what_the_kernel_does_not_take_goes_later_and_in_order(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    large, small = torch.arange(1_000_000), torch.ones(1)
    first, second = here.send(A, large), here.send(B, small)
    assert not first.done
    assert not second.done
    places = torch.zeros_like(large), torch.zeros(1)
    messages = there.receive(A, places[0]), there.receive(B, places[1])
    while here.going:
        read_all(there)
        here.write()
    read_all(there)
    assert all(message.done for message in (first, second, *messages))
    assert torch.equal(places[0], large)
    assert places[1].item() == 1


@pytest.mark.parametrize("early", [True, False])
def test_another_size_than_awaited_is_an_error(ends: tuple[Stream, Stream], early: bool) -> None:
    here, there = ends
    if early:
        here.send(A, torch.zeros(3))
        read_all(there)
        with pytest.raises(OSError, match="it sent 12 bytes where 8 are awaited"):
            there.receive(A, torch.zeros(2))
        return
    there.receive(A, torch.zeros(2))
    here.send(A, torch.zeros(3))
    with pytest.raises(OSError, match="it sent 12 bytes where 8 are awaited"):
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


@pytest.mark.parametrize("receive", [Stream.receive, Stream.take])
@pytest.mark.parametrize("others", [0, 1, 7, 100, 300, 20_000])
def test_what_is_awaited_comes_to_its_place_whatever_comes_before_it(
    ends: tuple[Stream, Stream], others: int, receive: Callable[[Stream, bytes, torch.Tensor], Message]
) -> None:
    here, there = ends
    if others:
        here.send(B, torch.full((others,), 2.0))
    here.send(A, torch.arange(100.0))
    place = torch.zeros(100)
    message = receive(there, A, place)
    while not message.done:
        there.read(awaited=message)
    assert torch.equal(place, torch.arange(100.0))
    if others:
        other = torch.zeros(others)
        assert receive(there, B, other).done
        assert torch.equal(other, torch.full((others,), 2.0))


@pytest.mark.parametrize("length", [1, 100, 16 << 10, 40_000])  # of which the last is not looked for
def test_what_comes_next_is_taken_without_being_posted(ends: tuple[Stream, Stream], length: int) -> None:
    here, there = ends
    place = torch.zeros(length)
    here.send(A, torch.arange(float(length)))
    assert there.take(A, place).done
    assert torch.equal(place, torch.arange(float(length)))
    assert not there._posted


def test_what_comes_in_pieces_is_taken(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    data = HEAD.pack(A, 8) + torch.tensor([1.0, 2.0]).numpy().tobytes()
    for cut in (1, HEAD.size - 1, HEAD.size, HEAD.size + 3):
        place = torch.zeros(2)
        here.connection.sendall(data[:cut])
        message = there.take(A, place)
        assert not message.done
        here.connection.sendall(data[cut:])
        while not message.done:
            there.read(awaited=message)
        assert place.tolist() == [1.0, 2.0]


def test_what_does_not_come_is_posted(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    there.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000))
    place = torch.zeros(1)
    message = there.take(A, place)
    assert not message.done
    here.send(A, torch.ones(1))
    read_all(there)
    assert message.done
    assert place.item() == 1


def test_another_size_than_is_to_be_taken_is_an_error(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    here.send(A, torch.zeros(3))
    with pytest.raises(OSError, match="it sent 12 bytes where 8 are awaited"):
        there.take(A, torch.zeros(2))


def test_nothing_is_taken_of_a_closed_connection(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    here.connection.close()
    with pytest.raises(ConnectionResetError):
        there.take(A, torch.zeros(1))


LARGE = 4_000_003  # numbers: more than the kernel takes of both ends together


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


def test_what_is_taken_of_a_key_comes_after_what_was_posted_or_came_before() -> None:
    both = threading.Barrier(2)

    def run(channel: Channel) -> list[float]:
        other = 1 - channel.rank
        places = [torch.zeros(1) for _ in range(6)]
        posted = channel.recv([places[0]], other, 1)
        for number, tag in ((0, 1), (1, 1), (2, 2), (3, 2), (5, 3)):
            channel.send([torch.tensor([float(number)])], other, tag)
        both.wait(10)  # or what is wrongly taken would not have come yet
        channel.recv_when_awaited([places[1]], other, 1).wait()
        posted.wait()
        channel.recv([places[5]], other, 3).wait()  # so that both before it came early
        channel.send([torch.tensor([4.0])], other, 2)
        both.wait(10)
        for place in places[2:5]:
            channel.recv_when_awaited([place], other, 2).wait()
        return [float(place) for place in places]

    assert on_threads(2, run) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2


def test_what_is_taken_waits_for_no_order() -> None:
    """While much is going both ways that the kernel does not take, and behind what nobody has posted."""

    def run(channel: Channel) -> list[float]:
        other = 1 - channel.rank
        sent = channel.send([torch.full((LARGE,), 1.0)], other, 1)
        channel.send([torch.full((3,), 2.0)], other, 2)
        small, large = torch.zeros(3), torch.zeros(LARGE)
        channel.recv_when_awaited([small], other, 2).wait()
        channel.recv_when_awaited([large], other, 1).wait()
        sent.wait()
        return [float(small.sum()), float(large.mean())]

    assert on_threads(2, run, 30) == [[6.0, 1.0]] * 2


def received(channel: Channel, place: torch.Tensor) -> None:
    """By a message that is awaited."""
    channel.recv([place], 1 - channel.rank, 0).wait()


def taken(channel: Channel, place: torch.Tensor) -> None:
    """The same in one call."""
    channel.recv_when_awaited([place], 1 - channel.rank, 0).wait()


@pytest.mark.parametrize("come", [received, taken])
def test_a_rank_that_leaves_is_named_at_once(come: Callable[[Channel, torch.Tensor], None]) -> None:
    def run(channel: Channel) -> float:
        if channel.rank == 1:
            return 0.0
        began = time.monotonic()
        with pytest.raises(LinkError, match="the connection to rank 1 has ended"):
            come(channel, torch.zeros(1))
        return time.monotonic() - began

    first, second = on_threads(2, run, 20)
    assert first < 10
    assert second == 0


@pytest.mark.parametrize("come", [received, taken])
def test_a_rank_that_is_silent_is_named_within_the_bound(come: Callable[[Channel, torch.Tensor], None]) -> None:
    def run(channel: Channel) -> float:
        began = time.monotonic()
        if channel.rank:
            time.sleep(1.5)
            return 0.0
        with pytest.raises(LinkError, match=r"nothing came of the message with rank 1 in 0\.5 s"):
            come(channel, torch.zeros(1))
        return time.monotonic() - began

    waited_s, _ = on_threads(2, run, 0.5)
    assert 0.5 <= waited_s < 1.5


@pytest.mark.parametrize("come", [received, taken])
def test_sizes_that_differ_name_the_rank(come: Callable[[Channel, torch.Tensor], None]) -> None:
    def run(channel: Channel) -> str:
        channel.send([torch.zeros(3 + channel.rank)], 1 - channel.rank, 0)
        with pytest.raises(LinkError) as caught:
            come(channel, torch.zeros(3 + channel.rank))
        return str(caught.value)

    first, _ = on_threads(2, run)
    assert first.startswith("the connection to rank 1 has ended: it sent 16 bytes where 12 are awaited")


def test_what_still_goes_at_the_end_arrives() -> None:
    def run(channel: Channel) -> float:
        if channel.rank:
            channel.send([torch.ones(LARGE)], 0, 0)
            return 0.0
        time.sleep(0.3)
        place = torch.zeros(LARGE)
        channel.recv([place], 1, 0).wait()
        return float(place.sum())

    assert on_threads(2, run, 30)[0] == LARGE
