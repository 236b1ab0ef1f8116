"""The page as text: complete, escaped, self-contained and under 5 MB however long the run was."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers.report.made_up import bent, good_run, mistaken, plus, with_check, without
from workers.report import charts, memory
from workers.report.judge import judge
from workers.report.page import page, write_page
from workers.report.records import (
    Activations,
    Chart,
    Check,
    Classes,
    Comparison,
    End,
    Failed,
    Losses,
    Lost,
    MemoryLine,
    Overlap,
    Profile,
    Ranks,
    Record,
    Said,
    Skipped,
    Start,
    Steps,
    Table,
    Timeline,
    Wire,
)

MOST_BYTES = 5_000_000
BUNDLE = re.compile(r"<script>/\*\*?\n?\* plotly\.js.*?</script>", re.DOTALL)


def drawn(records: Ranks) -> str:
    """The page without Plotly's bundle."""
    whole = page(judge(records), records)
    ours, bundles = BUNDLE.subn("", whole)
    assert bundles == 1
    return ours


def test_the_page_answers_every_question() -> None:
    shown = drawn(good_run())
    headings = (
        "The lesson,Checks,Losses,Bytes,Predicted and measured,Time,Memory,what each rank holds,all_reduce by size"
    )
    for heading in [*headings.split(","), "Ranks", "Repeat this run"]:
        assert f"<h2>{heading}</h2>" in shown
    assert "RUN_MODE=dp WORLD_SIZE=4 LAB_SEED=1 docker compose up" in shown
    assert "2.13.0+cpu" in shown and "LAB_STEPS" in shown
    assert "8 heads cannot be dealt to 3 ranks" in shown
    # losses, bytes a variant, time, memory and its line a variant, the lesson's
    assert shown.count("Plotly.newPlot") == 1 + 3 + 1 + (1 + 3) + 1
    assert "What went wrong" not in shown


UNIT = "epsilons of bfloat16"


def test_a_difference_that_has_a_unit_is_shown_with_it_and_heads_no_page_of_plain_ones() -> None:
    plain = drawn(good_run())
    assert "largest difference from one process, 1e-12 allowed" in plain
    assert "whole batch, in float64, after a few steps" in plain
    mixed = drawn(plus(good_run(), Check("bf16", "gradients", 2.5, 8.0, unit=UNIT)))
    assert "largest difference from one process in float64, 1e-12 allowed" in mixed
    assert f">8 {UNIT}<" in mixed
    assert "whole batch, in float64 where no unit is named, after" in mixed


def test_where_all_differences_have_units_the_one_closest_to_its_bound_heads_the_page() -> None:
    records = without(Check, good_run())
    for check in (Check("bf16", "gradients", 2.5, 8.0, unit=UNIT), Check("bf16", "weights", 0.5, 1.0, unit="units")):
        records = plus(records, check)
    shown = drawn(records)
    assert ">5.0e-01</b><span>largest difference of gradients and weights, 1 units allowed<" in shown
    assert "float64" not in shown[: shown.index("<h2>Losses")]


def test_activations_stand_beside_the_peak_of_all_memory() -> None:
    shown = drawn(plus(good_run(), Activations("naive", 2_500_000), rank=1))
    assert "Activations held for the backward pass" in shown
    assert "2.50 MB" in shown
    assert "Activations held" not in drawn(good_run())


def test_memory_is_drawn_by_class_from_the_fullest_rank() -> None:
    shown = drawn(good_run())
    bars = shown[shown.index("memory by class") :]
    assert bars.index('"name":"parameters"') < bars.index('"name":"gradients"') < bars.index('"name":"activations"')
    assert "[0.0,7800000.0,0.0,10800000.0,0.0,13800000.0]" in bars  # rest and peak of each variant, on rank 3
    assert '"name":"optimizer"' not in bars  # plain SGD has none
    line = bars[bars.index("memory over a step of naive") :]
    assert '"dx":7.317' in line  # 300 ms in 41 parts
    assert ",7.8," in line  # MB: the peak of the fullest rank, in the middle of the step
    assert '"range":[0,27.93' in line  # one scale for all variants: 5 % above the fullest


def test_a_run_from_before_the_ledger_still_shows_its_peak() -> None:
    shown = drawn(without(Classes, without(MemoryLine, good_run())))
    assert "<h2>Memory</h2>" in shown and "20.6 MB" in shown
    assert "memory by class" not in shown and "memory over a step" not in shown


def test_the_page_is_one_file() -> None:
    shown = drawn(good_run())
    assert '<meta name="viewport" content="width=device-width' in shown
    assert "default-src 'none'" in shown
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", shown)


def test_a_mistake_stands_right_under_the_verdict() -> None:
    shown = drawn(plus(mistaken(good_run()), Check("naive", "replicas", 0.5, 0.0)))
    header = shown[shown.index("<header") : shown.index("</header>")]
    made, seen = (
        header.index(words) for words in ("LAB_BUG=no_broadcast: every rank begins", "seen by naive replicas")
    )
    assert header.index('class="verdict"') < made < seen < header.index("<h1>")
    assert 'class="mistake"' not in drawn(good_run())


def test_what_went_wrong_comes_first() -> None:
    shown = drawn(
        plus(without(End, with_check(good_run(), "weights", 0.5), 2), Lost(2, 7, "killed"), Failed(3, "gone"))
    )
    assert shown.index("What went wrong") < shown.index("The lesson")
    assert "rank 2 lost at step 7: killed" in shown
    assert "naive weights: differs by 5.0e-01 where 1e-12 is allowed" in shown
    assert '<header class="lost">' in shown


def test_everything_that_was_written_is_escaped() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"

    def change(record: Record) -> Record:
        if isinstance(record, Start):
            return replace(
                record, title=evil, host=evil, repeat={"LAB_TEXT": evil}, config={evil: evil}, versions={evil: evil}
            )
        if isinstance(record, Check | Comparison | Losses | Steps | Wire) and record.variant == "naive":
            return replace(record, variant=evil)
        return record

    more: list[Record] = [
        Said(evil, evil + "\n" + evil),
        Skipped(evil, evil),
        Check(evil, evil, 0.0, 0.0, evil),
        Table(evil, [evil], [[evil]]),
        Chart(evil, evil, evil, {evil: [[1.0, 2.0], [1.0, 2.0]]}),
        Losses(evil, [1.0]),
        Timeline(evil, 3, [["forward", evil, 0.0, 1.0]]),
        Profile(evil, {"forward": 1.0}),
        Overlap(evil, 2.0, 1.0),
        Lost(3, 1, evil),
        Failed(1, evil),
    ]
    shown = drawn(plus(bent(good_run(), change), *more))
    assert "<img" not in shown and "<script>alert" not in shown and "</script><script>" not in shown
    assert "&lt;/script&gt;" in shown


@pytest.mark.timeout(120)
def test_a_long_run_of_many_ranks_stays_under_five_megabytes(tmp_path: Path) -> None:
    names = dict.fromkeys(("naive", "flat", "bucketed", "ring", "ddp", "means", "coordinator"), 0.05)
    records = good_run(8, 20_000, names)
    xs = [float(x) for x in range(5000)]
    many: list[Record] = [
        Chart(f"sweep {n}", "x", "y", {f"s{k}": [xs, [x * 1.1 for x in xs]] for k in range(8)}) for n in range(6)
    ]
    many += [
        Table(f"table {n}", ["a", "b", "c"], [[k, "some words in a cell", 1 / (k + 1)] for k in range(500)])
        for n in range(6)
    ]
    marks = [["all_reduce", "", 1e-4 * k, 1e-4 * k + 5e-5] for k in range(500)]
    records = {
        rank: [*of_rank, *(Timeline(name, 7, marks) for name in names)]
        for rank, of_rank in plus(records, *many).items()
    }
    path = write_page(tmp_path, judge(records), records)
    assert path.stat().st_size <= MOST_BYTES
    assert path.read_text().count('<figure class="gantt">') == len(names)
    assert "more are in the records" in path.read_text()


def test_a_page_of_64_ranks_is_small_and_names_them_all(tmp_path: Path) -> None:
    records = good_run(64, 50)
    path = write_page(tmp_path, judge(records), records)
    assert path.stat().st_size <= MOST_BYTES
    named = re.findall(r"<tr><td class=n>(\d+)</td><td>worker", path.read_text())
    assert named == [str(rank) for rank in range(64)]
    assert "Of 64 ranks the first 16 are shown; the records have all." in path.read_text()
    assert "ranks the first" not in drawn(good_run(8))


def test_how_charts_look_stands_once_in_the_page() -> None:
    page_text = drawn(good_run())
    assert page_text.count(f"const {charts.LOOK} = ") == 1
    assert page_text.count(f'"template":{charts.LOOK}') == page_text.count('class="chart"') > 0
    assert charts.EMPTY not in page_text


def test_a_second_curve_of_a_colour_is_dashed() -> None:
    names = [f"variant {index}" for index in range(len(charts.PALETTE) + 1)]
    figure = charts.lines({name: ([0, 1], [1, 2]) for name in names}, "x", "y", charts.colours(names), points=9)
    assert [curve.line.dash for curve in figure.data] == ["solid"] * len(charts.PALETTE) + ["dash"]


def test_a_coarser_line_keeps_its_peak() -> None:
    held = {"parameters": [4] * 10, "activations": [0, 1, 2, 9, 4, 3, 2, 1, 0, 0]}
    coarse = memory.coarser(held, 4)
    assert coarse == {"parameters": [4] * 4, "activations": [2, 9, 2, 0]}
    assert memory.coarser(held, 10) == held


@pytest.mark.parametrize("left", [Start, End, Check, Wire, Losses])
def test_a_page_is_drawn_from_whatever_is_there(left: type[Record]) -> None:
    records = good_run()
    only = {rank: [r for r in of_rank if isinstance(r, Start | left)] for rank, of_rank in records.items()}
    assert "Repeat this run" in drawn(only)
    if left is not Start:
        assert "Repeat this run" in drawn(without(left, records))


def test_a_curve_is_thinned_evenly_and_keeps_its_ends() -> None:
    x, y = charts.thinned((list(range(1001)), [0.123456789 * step for step in range(1001)]), 11)
    assert x == [100.0 * step for step in range(11)]
    assert y[-1] == 123.457
    assert charts.thinned(([0, 1], [5.0, float("nan")]), 100)[0] == [0, 1]


def test_a_variant_has_one_colour_in_all_charts() -> None:
    hues = charts.colours(["naive", "ddp", "naive"])
    assert list(hues) == ["naive", "ddp", "one process"]
    assert len(set(hues.values())) == 3


@pytest.mark.parametrize("ground", ["#ffffff", "#151b24"])
@pytest.mark.parametrize("hue", [*charts.PALETTE, charts.GREY])
def test_colours_can_be_told_from_both_grounds(hue: str, ground: str) -> None:
    light, dark = sorted((luminance(hue), luminance(ground)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
