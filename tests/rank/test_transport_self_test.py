"""The transport's self tests: known sums, the order of messages, a stranger. What is right passes, what is wrong is named."""

import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import distlab
from distlab.cluster.control_plane import Exchange
from distlab.collectives import rooted
from distlab.collectives.point_to_point import Steps
from distlab.lab import RunHooks
from distlab.rank import transport_self_test
from distlab.rank.transport_self_test import CALLS, Numbers, check_transport, differing, tried
from distlab.transport import handshake
from distlab.transport.handshake import WHO, Who
from distlab.transport.tcp import KEY, Channel, Message, Stream

pytestmark = pytest.mark.timeout(120)


@distlab.ranks(2, 4, backend="tcp", timeout_s=60)
def test_all_operations_are_as_they_should_be(rank: int, world_size: int) -> None:
    assert list(differing(rank, world_size)) == []


def lacking(*_: Any) -> Steps:
    """Nobody's part but one's own."""
    yield from ()


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_a_sum_that_lacks_a_rank_is_seen(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooted, "all_reduce", lacking)
        wrong = list(tried(Numbers(rank, world_size, 5, torch.float32), CALLS))
    assert {"all_reduce of 5 in float32", "the least of 5 in float32", "every second of 5 in float32"} <= set(wrong)


@distlab.ranks(3, backend="tcp", timeout_s=60)
def test_a_part_that_goes_to_another_rank_is_seen(rank: int, world_size: int) -> None:
    right = rooted.scatter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooted, "scatter", lambda peers, place, tensors, root: right(peers, place, tensors[::-1], root))
        wrong = list(tried(Numbers(rank, world_size, 5, torch.uint8), ["scatter", "gather"]))
    assert wrong == ["scatter of 5 in uint8"] or (rank == 1 and wrong == []), "the middle one has its own"


right_take = Stream.take


def without_a_name(_: Channel, tag: int) -> bytes:
    return KEY.pack(b"", tag)


def takes_what_comes(stream: Stream, key: bytes, tensor: Any) -> Message:
    """Whatever was posted before."""
    posted, stream._posted = stream._posted, []
    try:
        return right_take(stream, key, tensor)
    finally:
        stream._posted = [*posted, *stream._posted]


def in_order(name: str) -> tuple[float, str]:
    """How many messages are not those that were due, and which is the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(dist.PrefixStore(name, dist.distributed_c10d._get_default_store()), rank, size, timeout_s=30)
    found: list[Any] = []
    lab: Any = SimpleNamespace(
        rank=rank, world_size=size, group=dist.group.WORLD, exchange=exchange, at=lambda *_: None,
        check=lambda *claim, **words: found.append((*claim, words["detail"])),
    )  # fmt: skip
    check_transport(lab)
    ((name, faults, tolerance, detail),) = found
    assert (name, tolerance) == ("transport order", 0)
    return faults, detail


@distlab.ranks(2, 3, backend="tcp", timeout_s=60)
def test_messages_that_are_told_apart_hold() -> None:
    assert in_order("right") == (0, "8 messages of two groups")


@distlab.ranks(2, 3, backend="tcp", timeout_s=60)
def test_messages_that_are_mixed_are_seen() -> None:
    with patch.object(Channel, "_key", without_a_name):
        assert in_order("mixed") == (2, "message 1 where message 0 was due")
    with patch.object(Stream, "take", takes_what_comes):
        assert in_order("overtaken")[1] == "message 3 where message 2 was due"


def stranger_lab(rank: int, name: str, bound_s: float = 8.0) -> Any:
    """What the check needs of a lab, and its checks."""
    seen: list[float] = []
    lab: Any = SimpleNamespace(
        rank=rank,
        hooks=RunHooks(secret=b"the key of the run"),
        at=lambda step, phase: None,
        config=SimpleNamespace(collective_timeout_s=bound_s),
        exchange=SimpleNamespace(store=dist.PrefixStore(name, dist.distributed_c10d._get_default_store())),
        seen=seen,
    )
    lab.check = lambda name, off, allowed, **_: seen.append(off)
    return lab


@distlab.ranks(2, timeout_s=60)
def test_a_stranger_is_not_heard(rank: int, world_size: int) -> None:  # noqa: ARG001
    lab = stranger_lab(rank, "kept out")
    transport_self_test.check_stranger(lab)
    assert lab.seen == ([0] if rank == 0 else [])


@distlab.ranks(2, timeout_s=60)
def test_a_stranger_that_is_let_in_is_seen(rank: int, world_size: int) -> None:  # noqa: ARG001
    lab = stranger_lab(rank, "let in", bound_s=2.0)
    with pytest.MonkeyPatch.context() as patch:
        # The first who dials is believed, whatever is said.
        patch.setattr(handshake, "proven", lambda key, end, purpose, nonces, said: Who(*WHO.unpack_from(said)))
        transport_self_test.check_stranger(lab)
    assert lab.seen == ([1] if rank == 0 else [])
    dist.barrier()  # rank 1 finds nobody who listens any more, and waits its bound


def test_what_this_process_listens_at_is_found() -> None:
    before = transport_self_test.listening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert transport_self_test.listening() - before == {server.getsockname()[1]}
    assert transport_self_test.listening() == before
