"""Every meter is tried before it is believed: known cases hold, and each way of measuring wrong is seen by name."""

import time
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from distlab.measure import memory, storages, timeline, traffic
from distlab.measure.traffic import Connection, NoDiagnostics, WireBytes
from distlab.rank import meter_self_test
from distlab.rank.meter_self_test import (
    LEAST_MESSAGE_BYTES,
    MOST_BYTES,
    PIECES,
    amount,
    check_ledger,
    check_meters,
    measure_link,
    median_bits_s,
    message_bytes,
)
from distlab.report import verdict
from distlab.report.records import Check, Comparison, Said
from distlab.testing.warm_ranks import Ranks
from tests.labs import TINY, lab_of

SETTINGS = TINY | {"RUN_MODE": "dp", "MASTER_ADDR": "127.0.0.1"}


class NoGradients(memory.Owners):
    """Gradients count as activations."""

    def _held(self) -> Any:
        return ((tensor, label) for tensor, label in super()._held() if label != "gradients")


class SinceTheStart(timeline.Lap):
    """CPU seconds of the whole process."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.cpu_s = 1e3 + time.process_time()


FAULTS: dict[str, Any] = {
    "": (meter_self_test, "LENGTH_S", meter_self_test.LENGTH_S),
    "gradients": (memory, "Owners", NoGradients),
    "communication": (memory, "_STRONGEST_FIRST", ("parameters", "optimizer", "gradients", memory.SAVED)),
    "saved": (storages, "max", lambda *_: 0),
    "cpu": (meter_self_test, "Lap", SinceTheStart),
    "spans": (timeline, "CLASSES", timeline.CLASSES | {"all_reduce": "forward"}),
    "median": (verdict, "median", mean),
    "slowest": (meter_self_test, "slowest", lambda seconds: seconds[0]),
}


def checked(group: dist.ProcessGroup, folder: str, fault: str) -> tuple[float, str]:
    lab = lab_of(group, SETTINGS | {"WORLD_SIZE": str(group.size())}, folder)
    where, name, instead = FAULTS[fault]
    with patch.object(where, name, instead, create=True):
        check_meters(lab)
    (entry,) = (entry for entry in lab.journal.records if isinstance(entry, Check))
    assert (entry.name, entry.tolerance) == ("meters", 0)
    return entry.max_abs_diff, entry.detail


@pytest.mark.parametrize("world_size", [1, 3])
def test_meters_that_are_right_hold(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    assert (
        ranks(world_size, checked, str(tmp_path), "")
        == [(0, "memory, seconds, spans and ranks of known cases")] * world_size
    )


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("gradients", "bytes at rest"),
        ("communication", "bytes at the peak"),
        ("saved", "bytes saved for the backward pass"),
        ("cpu", "computing"),
        ("spans", "seconds by class"),
        ("median", "the median step of each rank"),
        ("slowest", "the slowest rank's step"),
    ],
)
def test_a_meter_that_is_wrong_is_seen(ranks: Ranks, tmp_path: Path, fault: str, told: str) -> None:
    for faults, detail in ranks(2, checked, str(tmp_path), fault):
        assert faults > 0
        assert told in detail


def quarter_of_a_peer(total: WireBytes, now: Connection, then: Connection | None) -> WireBytes:
    whole = right(total, now, then)
    return WireBytes(0.75 * whole.sent, whole.retransmitted)


def nothing(total: WireBytes, *_: Any) -> WireBytes:
    return total


def refused(_: int | None) -> dict[int, Connection]:
    raise NoDiagnostics("wire bytes are not measured: refused")


right = traffic._add
LEDGER_FAULTS: dict[str, Any] = {
    "called at 75 %": (traffic, "sent_bytes", lambda op, nbytes, size: 0.75 * nbytes),
    "a peer's bytes at 75 %": (traffic, "_add", quarter_of_a_peer),
    "bytes lost": (traffic, "_add", nothing),
    "no diagnostics": (traffic, "connections", refused),
    "": (traffic, "RESULT", traffic.RESULT),
}


def ledger_checked(group: dist.ProcessGroup, folder: str, fault: str) -> tuple[list[bool], list[str]]:
    lab = lab_of(group, SETTINGS | {"WORLD_SIZE": str(group.size())}, folder)
    where, name, instead = LEDGER_FAULTS[fault]
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
    assert ranks(3, ledger_checked, str(tmp_path), fault) == [(held, [])] * 3


def test_where_there_is_no_wire_it_is_said(ranks: Ranks, tmp_path: Path) -> None:
    (first, said), second = ranks(2, ledger_checked, str(tmp_path), "no diagnostics")
    assert (first, second) == ([True], ([True], []))
    assert said == ["wire bytes are not measured: refused on rank 0: it is compared with nothing"]


def test_a_world_of_one_says_why_there_is_nothing(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1, ledger_checked, str(tmp_path), "") == [
        ([], ["one rank sends nothing, so there is nothing to count"])
    ]


def test_amounts_tell_who_sent_what_to_whom() -> None:
    for rank in range(8):
        assert len({amount(rank, peer) for peer in range(8)}) == len({amount(peer, rank) for peer in range(8)}) == 8


# The links of the pool are not slow: a slow one would be seen.


def measured(group: dist.ProcessGroup, settings: dict[str, str], folder: str) -> tuple[list[Comparison], list[str]]:
    lab = lab_of(group, settings, folder)
    measure_link(lab)
    records = lab.journal.records
    return [each for each in records if isinstance(each, Comparison)], [
        each.text for each in records if isinstance(each, Said)
    ]


def settings_of(world_size: int, **more: str) -> dict[str, str]:
    return {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"} | more


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_holds_its_link_against_what_was_asked(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    settings = settings_of(world_size, LAB_NET_RATE="1mbit", LAB_NET_DELAY="50ms")
    everyone = ranks(world_size, measured, settings, str(tmp_path))
    for comparisons, _ in everyone:
        rate, trip = comparisons
        assert (rate.name, rate.unit, rate.predicted, rate.decides) == ("link rate", "bit/s", 1e6, False)
        assert rate.measured > 2e6  # the pool's links are not shaped: the measure does not repeat what was asked
        assert (trip.name, trip.unit, trip.predicted, trip.decides) == ("link round trip", "s", 0.1, False)
        assert 0 < trip.measured < 0.1
    (said,) = everyone[0][1]
    assert said.startswith("LAB_NET_RATE=1mbit and LAB_NET_DELAY=50ms asked for; measured")


def test_nothing_is_measured_where_nothing_was_asked_or_nobody_is_there(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, measured, settings_of(2), str(tmp_path)) == [([], []), ([], [])]
    ((comparisons, (said,)),) = ranks(1, measured, settings_of(1, LAB_NET_RATE="1mbit"), str(tmp_path / "alone"))
    assert comparisons == []
    assert said == "LAB_NET_RATE=1mbit changes nothing: one rank has nothing to send"


def test_a_message_takes_three_seconds_and_has_bounds() -> None:
    assert message_bytes(1e8) == 40_000_000
    assert (message_bytes(1e3), message_bytes(1e12), message_bytes(None)) == (
        LEAST_MESSAGE_BYTES,
        MOST_BYTES,
        MOST_BYTES,
    )


def test_a_stall_and_a_slow_start_are_no_part_of_the_rate() -> None:
    slow_start, steady = [0.2 * place for place in range(32)], 0.01
    arrived_s = slow_start + [
        slow_start[-1] + steady * (place + 1) + (place > 40 - 32) * 0.5 for place in range(PIECES - 32)
    ]
    assert median_bits_s(1000, arrived_s) == pytest.approx(8 * 1000 / steady)
