"""Messages over plain TCP: in any order, at any size, and never longer than the bound."""

import time
from collections.abc import Callable

import pytest
import torch

from distlab.transport.tcp import Channel, LinkError
from tests.transport.linked import on_threads

pytestmark = pytest.mark.timeout(60)
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
