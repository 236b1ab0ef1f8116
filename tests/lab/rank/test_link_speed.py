"""A link that was asked to be slow is measured on every rank, and held against what was asked."""

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
