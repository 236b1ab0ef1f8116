"""The transport is tried before it is believed: messages of two groups, and of one key, each way of mixing them seen."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.labs import TINY, lab_of
from workers.parallel.channel import KEY, Channel
from workers.parallel.dialling import Dialling
from workers.parallel.framing import Message
from workers.parallel.stream import Stream
from workers.parallel.tcp_group import TcpGroup
from workers.rank.known_messages import check_transport
from workers.report.records import Check
from workers.testing.calls import Ranks

SETTINGS = TINY | {"RUN_MODE": "dp", "MASTER_ADDR": "127.0.0.1"}


def without_a_name(_: Channel, tag: int) -> bytes:
    return KEY.pack(b"", tag)


def takes_what_comes(stream: Stream, key: bytes, tensor: Any) -> Message:
    """Whatever was posted or came before."""
    kept = stream._posted, stream._early
    stream._posted, stream._early = [], []
    try:
        return right(stream, key, tensor)
    finally:
        stream._posted, stream._early = [*kept[0], *stream._posted], [*kept[1], *stream._early]


right = Stream.take
FAULTS: dict[str, Any] = {
    "": (Stream, "take", right),
    "two groups": (Channel, "_key", without_a_name),
    "overtaken": (Stream, "take", takes_what_comes),
}


def checked(_: dist.ProcessGroup, folder: str, fault: str) -> list[tuple[float, str]]:
    if not hasattr(dist.Backend, "TCP"):
        Dialling("127.0.0.1").register()
    group = dist.new_group(backend="tcp")
    assert isinstance(group, TcpGroup)
    lab = lab_of(group, SETTINGS | {"WORLD_SIZE": str(group.size())}, folder)
    where, name, instead = FAULTS[fault]
    with patch.object(where, name, instead):
        check_transport(lab)
    found = [entry for entry in lab.journal.records if isinstance(entry, Check)]
    assert {(entry.name, entry.tolerance) for entry in found} <= {("transport", 0)}
    return [(entry.max_abs_diff, entry.detail) for entry in found]


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_that_are_told_apart_hold(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    assert ranks(world_size, checked, str(tmp_path), "") == [[(0, "7 messages of two groups")]] * world_size


@pytest.mark.parametrize(
    ("fault", "told"),
    [("two groups", "message 1 where message 0 was due"), ("overtaken", "message 3 where message 2 was due")],
)
def test_messages_that_are_mixed_are_seen(ranks: Ranks, tmp_path: Path, fault: str, told: str) -> None:
    for ((faults, detail),) in ranks(3, checked, str(tmp_path), fault):
        assert faults > 0
        assert told == detail
