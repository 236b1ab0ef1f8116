"""From marks to records: the bubble, what is placed where, and that every rank of a run writes its part."""

from pathlib import Path

import pytest

from distlab.collectives.phases import Span
from distlab.report import records
from distlab.testing.warm_ranks import Ranks
from distlab.verify.records import KEPT_STEPS, Chronicle, bounds, bubbles, placed
from tests.labs import run_experiment

pytestmark = pytest.mark.timeout(120)


def span(kind: str, start_s: float, end_s: float) -> Span:
    return Span(kind, "", start_s, end_s)


def test_data_is_no_part_of_the_step() -> None:
    spans = [span("data", 0, 1), span("forward", 5, 6), span("all_reduce", 6, 7), span("optimizer", 7, 9)]
    assert bounds(spans, offset_s=10) == [15, 19, [["forward", 15, 16]]]


def test_the_median_bubble_is_told() -> None:
    """Two ranks, three steps; rank 1 begins half a second late and computes as long as rank 0 idles."""

    def passes(*starts: float) -> dict[str, list[list[list[object]]]]:
        return {"flat": [[["forward", start, start + 1]] for start in starts]}

    assert bubbles([passes(0, 10, 20), passes(0.5, 10, 20.5)])["flat"] == pytest.approx(1 - 2 / (2 * 1.5))


def test_a_variant_without_passes_has_no_bubble() -> None:
    assert bubbles([{"flat": [[]]}]) == {"flat": None}


def test_a_long_run_keeps_its_last_steps() -> None:
    chronicle = Chronicle(["flat"])
    for step in range(3 * KEPT_STEPS):
        chronicle.add("flat", step, [])
    assert [step for step, _ in chronicle.steps["flat"]] == list(range(2 * KEPT_STEPS, 3 * KEPT_STEPS))


def test_spans_are_placed_to_the_microsecond() -> None:
    assert placed(span("forward", 1.00000049, 2.0), shift_s=-1.0) == ["forward", "", 0.0, 1.0]


def test_every_rank_writes_its_profile_and_its_clock(ranks: Ranks, tmp_path: Path) -> None:
    _, by_rank = run_experiment(ranks, 2, tmp_path, RUN_MODE="dp", LAB_VARIANT="flat,ddp", LAB_PROOF="0")
    profiles = list(records.select(by_rank, records.Profile))
    assert len(profiles) == 4
    assert all(entry.seconds["backward"] > 0 for _, entry in profiles)
    clocks = dict(records.select(by_rank, records.Clock))
    assert clocks[0].offset_s == 0
    assert 0 < clocks[1].uncertainty_s < 0.1
