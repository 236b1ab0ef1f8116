"""The transport is tried before it is believed: messages of two groups, and of one key, each way of mixing them seen."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import distlab
from distlab.cluster.control_plane import Exchange
from distlab.rank.traffic_self_test import check_transport
from distlab.transport.tcp import KEY, Channel, Message, Stream

pytestmark = pytest.mark.timeout(120)
right = Stream.take


def without_a_name(_: Channel, tag: int) -> bytes:
    return KEY.pack(b"", tag)


def takes_what_comes(stream: Stream, key: bytes, tensor: Any) -> Message:
    """Whatever was posted before."""
    posted, stream._posted = stream._posted, []
    try:
        return right(stream, key, tensor)
    finally:
        stream._posted = [*posted, *stream._posted]


def checked(name: str) -> tuple[float, str]:
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
    assert checked("right") == (0, "8 messages of two groups")


@distlab.ranks(2, 3, backend="tcp", timeout_s=60)
def test_messages_that_are_mixed_are_seen() -> None:
    with patch.object(Channel, "_key", without_a_name):
        assert checked("mixed") == (2, "message 1 where message 0 was due")
    with patch.object(Stream, "take", takes_what_comes):
        assert checked("overtaken")[1] == "message 3 where message 2 was due"
