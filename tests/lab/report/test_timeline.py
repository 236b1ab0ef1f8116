"""What a picture shows: whose message is whose, who came last, what is computed, sent and idle, and what is cut when it is too much."""

import math
import re

import pytest

from distlab.lab.report.html import source
from distlab.lab.report.page import page
from distlab.lab.report.records import Ideal, Messages, Placed, Timeline
from distlab.lab.report.timeline import (
    KINDS,
    NUMBERED,
    Arrow,
    Band,
    Scene,
    Span,
    arrows_of,
    bands_of,
    bubble_of,
    chunk_of,
    coarse,
    fitted,
    largest,
    scene,
    scenes,
    timelines,
)
from distlab.lab.report.timeline_panels import HUES, extremes, key, row_names, share_words, timeline
from distlab.lab.report.verdict import SCRIPT, judge
from tests.lab.report.made_up import SENT_BYTES, good_run, pipeline_run, plus, without
from tests.lab.report.test_page import luminance

pytestmark = pytest.mark.timeout(60)


def send(to: int, nbytes: int, start_s: float, tag: int = 0, sender: int = 0) -> list[object]:
    return ["send", [sender, to], nbytes, nbytes, tag, start_s, start_s + 0.5]


def receive(sender: int, nbytes: int, end_s: float, to: int = 1, tag: int = 0) -> list[object]:
    return ["recv", [sender, to], 0, nbytes, tag, 0.0, end_s]


def test_an_arrow_goes_from_the_send_to_the_receive_of_the_same_turn_and_tag() -> None:
    calls = {0: [send(1, 10, 1.0), send(1, 20, 2.0, tag=7), send(1, 30, 3.0)],
             1: [receive(0, 20, 2.5, tag=7), receive(0, 10, 4.0), receive(0, 30, 5.0)]}  # fmt: skip
    assert arrows_of(calls) == [Arrow(0, 1, 10, 1.0, 4.0), Arrow(0, 1, 20, 2.0, 2.5), Arrow(0, 1, 30, 3.0, 5.0)]


def test_what_nobody_received_ends_with_its_own_call_and_from_anyone_is_from_someone() -> None:
    assert arrows_of({0: [send(1, 10, 1.0)], 1: []}) == [Arrow(0, 1, 10, 1.0, 1.5)]
    assert arrows_of({0: [send(1, 10, 1.0)], 1: [receive(-1, 10, 9.0)]}) == [Arrow(0, 1, 10, 1.0, 9.0)]


def test_a_collective_is_one_of_all_its_ranks_and_the_last_is_named() -> None:
    def reduced(start_s: float, ranks: list[int]) -> list[object]:
        return ["all_reduce", ranks, 5, 10, 0, start_s, start_s + 2]

    calls = {0: [reduced(1.0, [0, 1]), reduced(5.0, [0, 1])], 1: [reduced(1.5, [0, 1]), reduced(4.0, [0, 1])],
             2: [reduced(0.0, [2, 3])], 3: [reduced(0.25, [2, 3])]}  # fmt: skip
    first, second, other = bands_of(calls)
    assert first == Band("all_reduce", 10, {0: 1.0, 1: 1.5}, {0: 3.0, 1: 3.5})
    assert (first.last, first.late_s, second.last, other.last) == (1, 0.5, 0, 3)


def test_shares_of_compute_communication_and_idle_time() -> None:
    spans = [[Span("forward", "0", 0, 1), Span("all_reduce", "", 0.5, 1)], [Span("backward", "0", 2, 4)]]
    assert Scene("flat", spans, [], [], [], [], "").shares == pytest.approx((2.5 / 8, 0.5 / 8, 5 / 8))
    inner = [[Span("forward", "0", 0, 4), Span("all_reduce", "", 1, 3)]]  # of a pass half is a call
    assert Scene("tp", inner, [], [], [], [], "").shares == pytest.approx((0.5, 0.5, 0))
    assert Scene("flat", spans, [Arrow(0, 1, 1, 0.0, 5.0)], [], [], [], "").step_s == 5.0


def test_all_reduce_bars_are_no_idle_time_and_what_pytorch_hides_is_not_called_idle() -> None:
    """Of 10 s 0.5 are computed and 9 summed, on each of two ranks; DDP sums inside of its pass."""
    summed = [[Span("forward", "0", 0, 0.5), Span("all_reduce", "", 1, 10)]] * 2
    inside = [[Span("backward", "0", 0, 9), Span("optimizer", "", 9, 9.5), Span("data", "", 9.5, 10)]] * 2
    run = {"comparisons": [], "by_torch": ["ddp"]}
    words = share_words(run, Scene("per_parameter", summed, [], [], [], [], ""))
    assert words == "compute 5%, communication and waiting 90%, idle 5%"
    words = share_words(run, Scene("ddp", inside, [], [], [], [], ""))
    assert words == "compute, communication and waiting 100% (not visible separately), idle 0%"


def test_a_scripts_own_compute_is_your_code() -> None:
    assert key({"run_mode": SCRIPT}, []) == [("idle", "your code")]
    assert key({"run_mode": "dp"}, []) == [("idle", "idle")]


def test_a_run_has_a_scene_a_variant_with_its_messages_and_its_schedule_on_paper() -> None:
    records = plus(pipeline_run(), Ideal("1f1b", [[["forward", "0", 0.0, 1.0]]]))
    gpipe, other = scenes(judge(records), records, 10_000)
    assert (gpipe.variant, other.variant) == ("gpipe", "1f1b")
    assert len(gpipe.arrows) == 2 * 3 * 8 and gpipe.cut == ""
    assert gpipe.sent_bytes == [8 * SENT_BYTES, 16 * SENT_BYTES, 16 * SENT_BYTES, 8 * SENT_BYTES]
    assert not gpipe.ideal and other.ideal == [[Span("forward", "0", 0.0, 1.0)]]
    assert scenes(judge(good_run()), good_run(), 100) == []


def test_steps_that_are_drawn_together_are_counted() -> None:
    spans = [Span(kind, "0", at, at + 1) for at, kind in enumerate(["forward", "optimizer"] * 4)]
    assert scene("local_sgd", [spans, []], {}, [], 99).steps == 4
    assert scene("ring", [[Span("all_reduce", "", 0, 1)]], {}, [], 99).steps == 1


def test_small_messages_are_omitted_first_and_reported() -> None:
    calls = {0: [send(1, nbytes, float(nbytes)) for nbytes in (5, 1, 9, 3)], 1: []}
    found = scene("flat", [[Span("forward", "", 0, 10)], []], calls, [], 4)
    assert [arrow.nbytes for arrow in found.arrows] == [5, 9, 3]
    assert found.cut == "the largest 3 of 4 messages are drawn, 94% of their bytes"
    assert found.sent_bytes == [18, 0]
    assert largest(found.arrows, [1, 1, 1], 0) == []


def test_too_many_bars_become_fewer_and_the_long_ones_stay() -> None:
    spans = [Span("forward", "0", 0.0, 0.5), Span("backward", "0", 0.5, 0.9)]
    spans += [Span("all_reduce", "", 0.9 + k * 1e-4, 0.9 + k * 1e-4 + 6e-5) for k in range(1000)]
    found = [spans, spans]
    assert fitted(found, 2004) is found
    fewer = fitted(found, 300)
    assert sum(map(len, fewer)) <= 300
    assert all(of_rank[:2] == spans[:2] for of_rank in fewer)
    joined = [span for span in fewer[0] if span.kind == "all_reduce"]
    assert joined and joined[-1].end_s == pytest.approx(spans[-1].end_s, abs=0.01)
    assert sum(map(len, fitted(found, 0))) <= 4  # the narrowest that one may ask for
    assert "spans shorter than a pixel are merged" in scene("flat", found, {}, [], 300).cut


def test_only_short_neighbours_are_joined() -> None:
    spans = [Span("send", str(k), start, end) for k, (start, end) in
             enumerate([(0.0, 0.1), (0.11, 0.2), (5.0, 6.0), (9.0, 9.1)])]  # fmt: skip
    assert coarse(spans, 0.2) == [Span("send", "", 0.0, 0.2), Span("send", "2", 5.0, 6.0)]
    assert coarse(spans, 0.01) == spans


def test_chunks_are_passed_in_order_and_backward_in_the_other() -> None:
    passes = [("forward", "0"), ("forward", "1"), ("forward", "0"), ("backward", "0"), ("send", "0"), ("backward", "0")]
    spans = [Span(kind, label, index, index + 1) for index, (kind, label) in enumerate(passes)]
    assert chunk_of(spans) == {0: 0, 1: 0, 2: 1, 3: 1, 5: 0}


def test_calls_of_an_older_run_are_simply_not_there() -> None:
    records = without(Messages, pipeline_run())
    assert all(not found.arrows and found.sent_bytes == [0] * 4 for found in scenes(judge(records), records, 999))


def test_spans_come_outer_first_and_a_rank_may_have_none() -> None:
    marks = [["all_reduce", "", 0.2, 0.4], ["forward", "0", 0.2, 1.0]]
    found = timelines(plus({0: [], 1: []}, Timeline("flat", 3, marks), rank=1), 2)
    assert [span.kind for span in found["flat"][1]] == ["forward", "all_reduce"] and found["flat"][0] == []


def test_the_profile_of_too_many_is_that_of_the_slowest_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    records = pipeline_run(2, 2, ("gpipe", "1f1b"))

    def profile() -> str:
        return page(judge(records), records).partition("<h2>Training profile</h2>")[2].partition("</section>")[0]

    assert profile().count("<tr>") == 1 + 4
    monkeypatch.setattr("distlab.lab.report.tables.MOST_PROFILES", 3)
    shown = profile()
    assert shown.count("<tr>") == 1 + 2 and shown.count(" ×</td>") == 2 and "the others are in the records" in shown


def test_a_bubble_is_shown_only_if_it_was_compared() -> None:
    run = judge(pipeline_run())
    bubble = bubble_of(run, "gpipe")
    assert bubble and f"{bubble['predicted']:.2f} {bubble['measured']:.2f}" == "0.27 0.31"
    assert bubble_of(run, "naive") is None


@pytest.mark.parametrize("kind", KINDS)
def test_bars_have_contrast_on_both_backgrounds_and_with_white_text(kind: str) -> None:
    hue = luminance(KINDS[kind][1]) + 0.05
    assert hue / (luminance("#151b24") + 0.05) >= 3
    assert 1.05 / hue >= 4.5


def test_kinds_nest_in_the_order_in_which_they_are_drawn() -> None:
    widths = [width for _, _, width in KINDS.values()]
    assert widths == sorted(widths, reverse=True)


def test_no_microbatch_has_the_colour_of_a_phase() -> None:
    """A difference of 24 (CIE 1976) is one that nobody overlooks side by side."""
    rules = dict(re.findall(r"^\.backward\.(\w+).* fill: (#\w+)", source("marks.css"), re.MULTILINE))
    strong = {hue: rules[hue] for hue in HUES}
    phases = {kind: hue for kind, (_, hue, _) in KINDS.items() if kind not in NUMBERED}
    near = [(name, kind) for name, one in strong.items() for kind, other in phases.items() if apart(one, other) < 24]
    assert not near
    assert apart("#7c3aed", phases["all_reduce"]) < 24 and apart("#0f766e", phases["reduce_scatter"]) < 24  # as it was


def apart(one: str, other: str) -> float:
    """How different two colours look: their distance in CIELAB."""
    return math.dist(lab(one), lab(other))


def lab(colour: str) -> tuple[float, float, float]:
    red, green, blue = (
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
        for v in (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    )
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in (
            (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
            0.2126 * red + 0.7152 * green + 0.0722 * blue,
            (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_rows_of_a_mesh_carry_their_place_and_those_of_one_axis_do_not() -> None:
    def placed(axes: dict[int, dict[str, list[int]]]) -> list[str]:
        records = good_run()
        for rank, where in axes.items():
            records = plus(records, Placed("127.0.0.1", "cpu", where, {}), rank=rank)
        return row_names(judge(records), records)

    grid = {rank: {"pp": [0, 1], "dp": [rank // 2, 2], "tp": [rank % 2, 2]} for rank in range(3)}
    assert placed(grid) == ["rank 0 · dp0 tp0", "rank 1 · dp0 tp1", "rank 2 · dp1 tp0", "rank 3"]
    assert placed({1: {"pp": [1, 4]}}) == placed({}) == [f"rank {rank}" for rank in range(4)]


def test_one_sentence_says_what_to_see() -> None:
    assert (
        extremes({"gpipe": 0.27, "1f1b_split": 0.2, "1f1b": 0.25})
        == "20% of the ranks' time in 1f1b_split, 27% in gpipe"
    )
    assert extremes({"gpipe": 0.27, "1f1b": 0.27}) == "27% of the ranks' time in each variant"
    records = pipeline_run()
    drawn = timeline(judge(records), records)
    assert (
        drawn and drawn.hint == "See the hatched gaps, in which a rank is idle: 31% of the ranks' time in each variant."
    )
