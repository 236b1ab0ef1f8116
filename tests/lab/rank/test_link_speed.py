"""A slow link is measured on every rank, and compared with the requested speed."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distlab.lab.rank.link_speed import (
    LEAST_MESSAGE_BYTES,
    MOST_BYTES,
    PIECES,
    measure_link,
    median_bits_s,
    message_bytes,
)
from distlab.lab.report.records import Comparison, Said
from tests.labs import lab_of
from tests.warm_ranks import Ranks

# The links between the ranks of these tests are fast, so a measurement that repeats the request would fail.


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
def test_every_rank_compares_its_link_with_the_request(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    settings = settings_of(world_size, LAB_NET_RATE="1mbit", LAB_NET_DELAY="50ms")
    everyone = ranks(world_size, measured, settings, str(tmp_path))
    for comparisons, _ in everyone:
        rate, trip = comparisons
        assert (rate.name, rate.unit, rate.predicted, rate.decides) == ("link rate", "bit/s", 1e6, False)
        assert rate.measured > 2e6  # measured, not the requested value
        assert (trip.name, trip.unit, trip.predicted, trip.decides) == ("link round trip", "s", 0.1, False)
        assert 0 < trip.measured < 0.1
    (line,) = everyone[0][1]
    assert line.startswith("LAB_NET_RATE=1mbit and LAB_NET_DELAY=50ms requested; measured")


def test_no_link_is_measured_without_a_request_or_with_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, measured, settings_of(2), str(tmp_path)) == [([], []), ([], [])]
    ((comparisons, (line,)),) = ranks(1, measured, settings_of(1, LAB_NET_RATE="1mbit"), str(tmp_path / "alone"))
    assert comparisons == []
    assert line == "LAB_NET_RATE=1mbit changes nothing: one rank has nothing to send"


def test_a_message_takes_three_seconds_and_has_bounds() -> None:
    assert message_bytes(1e8) == 40_000_000
    assert (message_bytes(1e3), message_bytes(1e12), message_bytes(None)) == (
        LEAST_MESSAGE_BYTES,
        MOST_BYTES,
        MOST_BYTES,
    )


def test_a_stall_and_a_slow_start_do_not_change_the_rate() -> None:
    slow_start, steady = [0.2 * place for place in range(32)], 0.01
    arrived_s = slow_start + [
        slow_start[-1] + steady * (place + 1) + (place > 40 - 32) * 0.5 for place in range(PIECES - 32)
    ]
    assert median_bits_s(1000, arrived_s) == pytest.approx(8 * 1000 / steady)
