"""The recorded steps: one of each variant is drawn, with all that it sends, PyTorch's own too."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.lab.measure.event_order import Message
from distlab.lab.report import records
from distlab.lab.report.timeline import arrows_of, bands_of
from distlab.lab.verify.counted import ever_repeats, repeats_after
from distlab.lab.verify.records import (
    KEPT_STEPS,
    Chronicle,
    Drawn,
    bounds,
    bubbles,
    compare_drawn,
    count_messages,
    median_step,
    placed,
    written,
)
from distlab.techniques.collectives.phases import Span
from tests.lab.test_lab import counted, held, lab_alone
from tests.labs import run_experiment
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


def test_the_step_of_median_length_is_drawn() -> None:
    """Three steps of 4, 2 and 3 s; rank 1 begins and ends later or earlier."""
    rank_0, rank_1 = [[0.0, 4.0], [10.0, 12.0], [20.0, 23.0]], [[0.5, 3.5], [10.0, 12.0], [20.5, 22.5]]
    assert median_step([rank_0, rank_1]) == (2, 20.0)


def test_a_message_is_written_to_the_microsecond() -> None:
    message = Message("send", (0, 1), 8.0, 8, 3, 1.00000049, 2.0)
    assert written(message, shift_s=-1.0) == ["send", [0, 1], 8, 8, 3, 0.0, 1.0]


@pytest.mark.parametrize(("mode", "variants", "seen"), [
    ("dp", "per_parameter,ring,ddp", {"per_parameter": "all_reduce", "ring": "send", "ddp": "all_reduce"}),
    ("fsdp", "zero3,fsdp2", {"zero3": "send", "fsdp2": "reduce_scatter"}),
    ("pp", "1f1b,torch_1f1b", {"1f1b": "send", "torch_1f1b": "send"}),
])  # fmt: skip
def test_all_that_is_sent_is_written_and_as_many_bytes_as_the_ledger_saw(
    ranks: Ranks, tmp_path: Path, mode: str, variants: str, seen: dict[str, str]
) -> None:
    run, by_rank = run_experiment(ranks, 3, tmp_path, RUN_MODE=mode, LAB_VARIANT=variants, LAB_PROOF="0", LAB_DEPTH="3")
    compared = {each["variant"]: each for each in run["comparisons"] if each["name"] == "drawn bytes"}
    for variant, op in seen.items():
        calls: dict[int, list[Any]] = {
            rank: each.calls for rank, each in records.select(by_rank, records.Messages) if each.variant == variant
        }
        assert op in {call[0] for of_rank in calls.values() for call in of_rank}
        assert compared[variant]["passed"] and compared[variant]["measured"] > 0
        assert all(len(band.starts_s) == 3 for band in bands_of(calls))
        sends = Counter(call[0] for of_rank in calls.values() for call in of_rank)
        assert sends["send"] == sends["recv"] == len(arrows_of(calls))
        assert all(call[5] <= call[6] for of_rank in calls.values() for call in of_rank)


def test_every_rank_writes_one_step_of_each_variant_on_one_clock_and_its_profile(ranks: Ranks, tmp_path: Path) -> None:
    _, by_rank = run_experiment(ranks, 2, tmp_path, RUN_MODE="dp", LAB_VARIANT="flat,ddp", LAB_PROOF="0")
    profiles = list(records.select(by_rank, records.Profile))
    assert len(profiles) == 4 and all(entry.seconds["backward"] > 0 for _, entry in profiles)
    clocks = dict(records.select(by_rank, records.Clock))
    assert clocks[0].offset_s == 0 < clocks[1].uncertainty_s < 0.1
    timelines = {(rank, entry.variant): entry for rank, entry in records.select(by_rank, records.Timeline)}
    assert set(timelines) == {(rank, variant) for rank in (0, 1) for variant in ("flat", "ddp")}
    for variant in ("flat", "ddp"):
        pair = [timelines[rank, variant] for rank in (0, 1)]
        assert pair[0].step == pair[1].step
        assert min(start for entry in pair for _, _, start, _ in entry.spans) == pytest.approx(0, abs=2e-6)
        assert {"forward", "backward", "optimizer"} <= {kind for kind, *_ in pair[0].spans}


@pytest.mark.parametrize(("drawn", "wire", "holds"), [
    (1000.0, 1000.0, [True, True]), (992.0, 1300.0, [True, True]), (980.0, 980.0, [False, True]),
    (1000.0, 2000.0, [True, False]), (1000.0, 500.0, [True, False]),
])  # fmt: skip
def test_a_message_that_is_not_drawn_is_seen(drawn: float, wire: float, holds: list[bool]) -> None:
    lab = lab_alone()
    compare_drawn(lab, {"flat": Drawn(drawn, 2)}, counted(1000.0, wire, 0))  # 320 B of frames are allowed
    assert held(lab) == dict(zip(("drawn bytes", "wire as drawn"), holds, strict=True))


@pytest.mark.parametrize(("name", "ops", "decides"), [
    ("flat", {"all_reduce"}, [True, True]), ("flat", {"reduce_scatter"}, [True, False]),
    ("mine/own.py:step", {"send"}, [False, False]),
])  # fmt: skip
def test_own_variants_and_gloos_own_operations_are_informational(name: str, ops: set[str], decides: list[bool]) -> None:
    lab = lab_alone()
    compare_drawn(lab, {name: Drawn(1000.0, 2, frozenset(ops))}, {name: counted(1000.0, 1000.0, 0)["flat"]})
    found = [each for each in lab.journal.records if isinstance(each, records.Comparison)]
    assert [each.decides for each in found] == decides


@pytest.mark.parametrize(
    ("says", "counted_steps", "ever"),
    [({}, 1, True), ({"repeats_after": 4}, 4, True), ({"repeats_after": 0}, 1, False)],
)
def test_a_strategy_says_when_its_steps_repeat(says: dict[str, int], counted_steps: int, ever: bool) -> None:
    strategy: Any = SimpleNamespace(**says)
    assert (repeats_after(strategy), ever_repeats(strategy)) == (counted_steps, ever)


def test_steps_that_never_repeat_are_informational() -> None:
    lab = lab_alone()
    compare_drawn(lab, {"ep": Drawn(900.0, 2, repeats=False)}, {"ep": counted(1000.0, 1000.0, 0)["flat"]})
    found = [each for each in lab.journal.records if isinstance(each, records.Comparison)]
    assert {each.shown for each in found} == {"its steps send different bytes"}
    assert not any(each.decides for each in found)


def test_messages_are_counted_as_gloo_sends_them() -> None:
    def message(op: str, *ranks: int) -> Message:
        return Message(op, ranks, 8.0, 8, 0, 0.0, 1.0)

    assert count_messages([message("send", 0, 1), message("recv", 1, 0), message("recv", 2, 0)]) == 2
    assert count_messages([message("all_reduce", 0, 1, 2), message("all_gather", 0, 1, 2)]) == 8 + 4
    assert count_messages([message("all_to_all", 0, 1, 2)]) == 2


# From marks to records: the bubble, what is placed where, and that every rank of a run writes its part.


def span(kind: str, start_s: float, end_s: float) -> Span:
    return Span(kind, "", start_s, end_s)


def test_data_is_no_part_of_the_step() -> None:
    spans = [span("data", 0, 1), span("forward", 5, 6), span("all_reduce", 6, 7), span("optimizer", 7, 9)]
    assert bounds(spans, offset_s=10) == [15, 19, [["forward", 15, 16]]]


def test_the_median_bubble_is_returned() -> None:
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
