"""The ledger is tried before it is believed: a known amount, found to the byte, and every way of miscounting it seen."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from distlab.measure import sockets, traffic
from distlab.measure.sockets import Connection, NoDiagnostics
from distlab.measure.traffic import WireBytes
from distlab.rank.traffic_self_test import amount, check_ledger
from distlab.report.records import Check, Said
from distlab.testing.warm_ranks import Ranks
from tests.labs import TINY, lab_of

SETTINGS = TINY | {"RUN_MODE": "dp", "MASTER_ADDR": "127.0.0.1"}


def quarter_of_a_peer(total: WireBytes, now: Connection, then: Connection | None) -> WireBytes:
    whole = right(total, now, then)
    return WireBytes(0.75 * whole.sent, whole.retransmitted)


def nothing(total: WireBytes, *_: Any) -> WireBytes:
    return total


def refused() -> dict[int, Connection]:
    raise NoDiagnostics("wire bytes are not measured: refused")


right = traffic._add
FAULTS: dict[str, Any] = {
    "called at 75 %": (traffic, "sent_bytes", lambda op, nbytes, size: 0.75 * nbytes),
    "a peer's bytes at 75 %": (traffic, "_add", quarter_of_a_peer),
    "bytes lost": (traffic, "_add", nothing),
    "no diagnostics": (sockets, "connections", refused),
    "": (traffic, "RESULT", traffic.RESULT),
}


def checked(group: dist.ProcessGroup, folder: str, fault: str) -> tuple[list[bool], list[str]]:
    lab = lab_of(group, SETTINGS | {"WORLD_SIZE": str(group.size())}, folder)
    where, name, instead = FAULTS[fault]
    with patch.object(where, name, instead):
        check_ledger(lab)
    entries = [entry for entry in lab.journal.records if isinstance(entry, Check)]
    assert {entry.name for entry in entries} <= {"ledger"}
    said = [entry.text for entry in lab.journal.records if isinstance(entry, Said)]
    return [entry.max_abs_diff <= entry.tolerance for entry in entries], said


@pytest.mark.parametrize(
    ("fault", "held"),
    [
        ("", [True, True]),
        ("called at 75 %", [False, True]),
        ("a peer's bytes at 75 %", [True, False]),
        ("bytes lost", [True, False]),
    ],
)
def test_a_ledger_that_counts_wrong_is_seen(ranks: Ranks, tmp_path: Path, fault: str, held: list[bool]) -> None:
    assert ranks(3, checked, str(tmp_path), fault) == [(held, [])] * 3


def test_where_there_is_no_wire_it_is_said(ranks: Ranks, tmp_path: Path) -> None:
    (first, said), second = ranks(2, checked, str(tmp_path), "no diagnostics")
    assert (first, second) == ([True], ([True], []))
    assert said == ["wire bytes are not measured: refused on rank 0: it is compared with nothing"]


def test_a_world_of_one_says_why_there_is_nothing(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1, checked, str(tmp_path), "") == [([], ["one rank sends nothing, so there is nothing to count"])]


def test_amounts_tell_who_sent_what_to_whom() -> None:
    for rank in range(8):
        assert len({amount(rank, peer) for peer in range(8)}) == len({amount(peer, rank) for peer in range(8)}) == 8
