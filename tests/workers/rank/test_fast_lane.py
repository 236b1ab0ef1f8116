"""The fast lane: a group whose sockets are labelled, all of them and no others; and the words where there is none."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.labs import lab_of
from workers.cluster import link
from workers.cluster.link import LABEL, Shaped
from workers.measure import sockets
from workers.rank.fast_lane import fast_lane, labelled, measure_lane
from workers.report.records import Comparison
from workers.testing.calls import MAX, Ranks

SETTINGS = {
    "WORLD_SIZE": str(MAX),
    "MASTER_ADDR": "127.0.0.1",
    "LAB_NET_RATE": "1mbit",
}  # new_group takes all of the pool


def labels() -> dict[int, int]:
    """The label of each of this process's TCP connections, by inode."""
    mine = sockets.connections()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = os.stat(f"/proc/self/fd/{name}").st_ino
        except OSError:  # the descriptor of the listing itself
            continue
        if inode in mine:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                found[inode] = copy.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
    return found


def shaped_as(done: Shaped, folder: str, rank: int) -> None:
    """As the entry point would have left it, in a rank of the pool."""
    link.SHAPED = Path(folder) / f"shaped{rank}"
    link.write(done)


def lane_of(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> dict[str, Any]:
    """What a rank sees of a lane: labels before, inside and after, a sum over it, and its rate."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    usual = link.SHAPED
    seen: dict[str, Any] = {}
    shaped_as(Shaped(settings["LAB_NET_RATE"], None), folder, group.rank())
    try:
        lab = lab_of(group, settings, folder)
        before = labels()
        with fast_lane(lab) as lane:
            assert isinstance(lane, dist.ProcessGroup)
            inside = labels()
            total = torch.ones(3) * lab.rank
            dist.all_reduce(total, group=lane)
            seen["words"] = measure_lane(lab, lane)
        seen["total"] = total.tolist()
        seen["old"] = {inside[inode] for inode in before}
        seen["new"] = [inside[inode] for inode in inside if inode not in before]
        seen["rates"] = [each for each in lab.journal.records if isinstance(each, Comparison)]
        del lane
        seen["left"] = LABEL in labels().values()
    finally:
        link.SHAPED = usual
        del os.environ["GLOO_SOCKET_IFNAME"]
    return seen


def test_a_lanes_sockets_are_labelled_and_no_others(ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks(MAX, lane_of, SETTINGS, str(tmp_path)):
        assert seen["new"] == [LABEL] * (MAX - 1)
        assert seen["old"] == {0}
        assert seen["total"] == [sum(range(MAX))] * 3
        assert not seen["left"]
        (rate,) = seen["rates"]
        assert (rate.name, rate.unit, rate.predicted, rate.decides) == ("fast lane rate", "bit/s", 4e6, False)
        # The pool's links are not shaped, and the measure does not repeat what was asked.
        assert 0 < rate.measured != rate.predicted
        assert seen["words"].startswith("4.00 Mbit/s asked for, ")


def reason(group: dist.ProcessGroup, settings: dict[str, str], folder: str, faults: list[str | None]) -> str:
    """Why a rank has no lane, where each rank's link was shaped with its own of `faults`, or not at all if that is
    None."""
    usual = link.SHAPED
    fault = faults[group.rank()]
    link.SHAPED = Path(folder) / "nothing"
    if fault is not None:
        shaped_as(Shaped(settings["LAB_NET_RATE"], None, no_lane=fault), folder, group.rank())
    try:
        with fast_lane(lab_of(group, settings, folder)) as lane:
            return str(lane)
    finally:
        link.SHAPED = usual


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (["", "this kernel has no bands"], "this kernel has no bands"),  # of one rank alone: all go without
        ([None, None], "this rank's link was not shaped"),
    ],
)
def test_without_a_lane_every_rank_hears_why(ranks: Ranks, tmp_path: Path, faults: list[str | None], why: str) -> None:
    assert ranks(2, reason, SETTINGS | {"WORLD_SIZE": "2"}, str(tmp_path), faults) == [why, why]


def test_only_the_named_sockets_are_labelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one, other = (socket.create_connection(listener.getsockname()) for _ in range(2))
        with one, other:
            inode = os.fstat(one.fileno()).st_ino
            assert list(labelled({inode, 1})) == [inode]
            assert [each.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for each in (one, other)] == [LABEL, 0]
            assert one.fileno() >= 0
            one.send(b"it is still open")
