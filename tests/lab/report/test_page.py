"""The page as text: complete, escaped, self-contained and small however long the run was."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from distlab.lab.report import charts, cost_charts
from distlab.lab.report.glossary import COLUMNS
from distlab.lab.report.html import asset
from distlab.lab.report.page import page, write_page
from distlab.lab.report.records import (
    Activations,
    Chart,
    Check,
    Classes,
    Comparison,
    End,
    Failed,
    Ideal,
    Lesson,
    Losses,
    Lost,
    MemoryLine,
    Messages,
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
from distlab.lab.report.tables import Plan, planned
from distlab.lab.report.verdict import judge
from tests.lab.report.made_up import bent, drilled_run, good_run, mistaken, pipeline_run, plus, with_check, without

MOST_BYTES = 3_000_000  # of 8 ranks and 5 variants
MOST_OF_FOUR = 700_000  # of 4 ranks


def drawn(records: Ranks) -> str:
    """The page of a run."""
    return page(judge(records), records)


def test_the_page_answers_every_question() -> None:
    shown = drawn(good_run())
    headings = (
        "About this mode,Checks,Losses,Bytes,Predicted and measured,Time,Memory,what each rank holds,all_reduce by size"
    )
    for heading in [*headings.split(","), "Ranks", "Repeat this run"]:
        assert f"<h2>{heading}</h2>" in shown
    assert "RUN_MODE=dp WORLD_SIZE=4 LAB_SEED=1 docker compose up" in shown
    assert "2.13.0+cpu" in shown and "LAB_STEPS" in shown
    assert "8 heads cannot be dealt to 3 ranks" in shown
    # losses, bytes a variant, time, memory and its line a variant, the lesson's
    assert shown.count('class="pygal-chart"') == 1 + 3 + 1 + (1 + 3) + 1
    assert "What went wrong" not in shown


def test_injected_faults_are_a_table_with_their_effects() -> None:
    shown = drawn(drilled_run())
    assert "<h2>Injected faults</h2>" in shown and "<h2>Injected faults" not in drawn(good_run())
    row = r"<td[^>]*>pause rank 1 for 2 s at step 30</td><td>no rank is lost</td><td>no rank was lost</td><td><span class="
    assert re.search(row + r'"chip good">passed', shown)


UNIT = "epsilons of bfloat16"


def test_the_planners_numbers_are_beside_measured_ones() -> None:
    records = good_run()
    run = judge(records)
    shown = page(run, records, Plan({"naive": (100e-3, 2e6), "unseen": (1.0, 1.0)}, ["compute from here"]))
    (row,) = planned(run, Plan({"naive": (100e-3, 2e6), "unseen": (1.0, 1.0)}, [])).rows
    step_s = max(run["variants"][0]["step_seconds"])
    assert row[:4] == ["naive", "100", f"{step_s * 1e3:.1f}", f"{0.1 / step_s - 1:+.0%}"]
    assert "What the planner predicts" in shown and "<p>compute from here</p>" in shown
    assert "What the planner predicts" not in drawn(records)
    without_any = page(run, records, Plan({}, ["not planned: no link"]))
    assert "not planned: no link" in without_any and "Predicted by distlab plan" not in without_any


def test_a_difference_that_has_a_unit_is_shown_with_it_and_heads_no_page_of_plain_ones() -> None:
    plain = drawn(good_run())
    assert "largest difference from one process, 1e-12 allowed" in plain
    assert ">float64, against the reference<" in plain and ">(tolerance 1e-12)<" in plain
    mixed = drawn(plus(good_run(), Check("bf16", "gradients", 2.5, 8.0, unit=UNIT)))
    assert "largest difference from one process in float64, 1e-12 allowed" in mixed
    assert f">passed</span> (tolerance 8 {UNIT})<" in mixed


def test_where_all_differences_have_units_the_one_closest_to_its_bound_heads_the_page() -> None:
    records = without(Check, good_run())
    for check in (Check("bf16", "gradients", 2.5, 8.0, unit=UNIT), Check("bf16", "weights", 0.5, 1.0, unit="units")):
        records = plus(records, check)
    shown = drawn(records)
    assert ">5.0e-01</b> largest difference of gradients and weights, 1 unit allowed<" in shown
    assert "float64" not in shown[: shown.index("<h2>Losses")]


def test_activations_are_beside_the_peak_of_all_memory() -> None:
    shown = drawn(plus(good_run(), Activations("naive", 2_500_000), rank=1))
    assert "Peak of the activations" in shown
    assert "2.50 MB" in shown
    assert "Activations kept" not in drawn(good_run())


def test_memory_is_drawn_by_class_from_the_fullest_rank() -> None:
    shown = drawn(good_run())
    bars = shown[shown.index("memory by class") : shown.index("Over the counted step")]
    classes = re.findall(r'class="series" data-n="\w+" style="--hue:(#\w+)', bars)
    assert classes == [
        cost_charts.MEMORY_COLOURS[kind] for kind in ("parameters", "gradients", "activations")
    ]  # plain SGD: no more
    values = re.findall(r"<title>(.*?)</title>", bars[bars.index(classes[2]) :])
    # From the bottom: rest and peak of each variant, on rank 3.
    assert values == ["13.8MB", "0B", "10.8MB", "0B", "7.8MB", "0B"]


def test_a_run_from_before_the_ledger_still_shows_its_peak() -> None:
    shown = drawn(without(Classes, without(MemoryLine, good_run())))
    assert "<h2>Memory</h2>" in shown and "20.6 MB" in shown
    assert "memory by class" not in shown and "memory over a step" not in shown


def test_the_page_is_one_file() -> None:
    shown = drawn(good_run())
    assert '<meta name="viewport" content="width=device-width' in shown
    assert "default-src 'none'" in shown
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", shown)


def test_an_injected_bug_is_right_under_the_verdict() -> None:
    shown = drawn(plus(mistaken(good_run()), Check("naive", "replicas", 0.5, 0.0)))
    header = shown[shown.index("<header") : shown.index("</header>")]
    made, seen = (
        header.index(words) for words in ("LAB_BUG=no_broadcast: every rank begins", "caught by naive replicas")
    )
    assert header.index('class="verdict"') < made < seen < header.index("<h1>")
    assert 'class="mistake"' not in drawn(good_run())


def test_failures_come_first() -> None:
    shown = drawn(
        plus(without(End, with_check(good_run(), "weights", 0.5), 2), Lost(2, 7, "killed"), Failed(3, "gone"))
    )
    assert shown.index("What went wrong") < shown.index("About this mode")
    assert "rank 2 lost at step 7: killed" in shown
    assert "naive weights: differs by 5.0e-01, but only 1e-12 is allowed" in shown
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
        Lost(3, 1, evil),
        Messages(evil, [["all_reduce", [0, 1], 1, 1, 0, 0.0, 1.0], ["send", [0, 1], 1, 1, 0, 0.0, 1.0]]),
        Ideal(evil, [[["forward", evil, 0.0, 1.0]]]),
        Lesson([evil], {evil: evil}, [[evil] * 5]),
        Failed(1, evil),
    ]
    shown = drawn(plus(bent(good_run(), change), *more))
    assert "<img" not in shown and "<script>alert" not in shown and "</script><script>" not in shown
    assert "&lt;/script&gt;" in shown


@pytest.mark.timeout(120)
def test_a_long_run_of_many_ranks_stays_under_three_megabytes(tmp_path: Path) -> None:
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
    assert path.read_text().count('<svg class="panel"') == len(names)
    assert "spans shorter than a pixel are merged" in path.read_text()
    assert "more are in the records" in path.read_text()


def test_a_page_of_64_ranks_is_small_and_names_them_all(tmp_path: Path) -> None:
    records = good_run(64, 50)
    path = write_page(tmp_path, judge(records), records)
    assert path.stat().st_size <= MOST_BYTES
    named = re.findall(r"<tr><td class=n>(\d+)</td><td>worker", path.read_text())
    assert named == [str(rank) for rank in range(64)]
    assert "Of 64 ranks the first 16 are shown; the records have all." in path.read_text()
    assert "ranks the first" not in drawn(good_run(8))


def test_the_style_of_charts_is_once_in_the_page() -> None:
    page_text = drawn(good_run())
    assert page_text.count(asset("charts.css")) == 1
    assert page_text.count('class="chart"') == page_text.count('class="pygal-chart"') > 0


def test_a_page_of_four_ranks_is_small() -> None:
    assert len(drawn(pipeline_run(4, 8, ("naive", "gpipe", "1f1b", "interleaved", "zb"))).encode()) <= MOST_OF_FOUR


def test_the_picture_is_right_below_the_verdict() -> None:
    shown = drawn(pipeline_run())
    order = ["<header", 'class="hint"', 'class="numbers"', "on one axis of time</h2>", "<h2>About this mode", "<h2>Checks", "<h2>Losses", "<h2>Bytes",
             "<h2>Time", "<h2>Training profile", "<h2>Memory", "<h2>Repeat this run"]  # fmt: skip
    assert sorted(order, key=shown.index) == order
    assert "on one axis of time" not in drawn(good_run())


def test_a_coarser_line_keeps_its_peak() -> None:
    amounts = {"parameters": [4] * 10, "activations": [0, 1, 2, 9, 4, 3, 2, 1, 0, 0]}
    coarse = cost_charts.coarser(amounts, 4)
    assert coarse == {"parameters": [4] * 4, "activations": [2, 9, 2, 0]}
    assert cost_charts.coarser(amounts, 10) == amounts


@pytest.mark.parametrize("left", [Start, End, Check, Wire, Losses])
def test_a_page_is_drawn_from_whatever_is_there(left: type[Record]) -> None:
    records = good_run()
    only = {rank: [r for r in of_rank if isinstance(r, Start | left)] for rank, of_rank in records.items()}
    assert "Repeat this run" in drawn(only)
    if left is not Start:
        assert "Repeat this run" in drawn(without(left, records))


@pytest.mark.parametrize("ground", ["#ffffff", "#151b24"])
@pytest.mark.parametrize("hue", [*charts.PALETTE, charts.GREY])
def test_colours_have_contrast_on_both_backgrounds(hue: str, ground: str) -> None:
    light, dark = sorted((luminance(hue), luminance(ground)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def timed(times: dict[str, list[float]]) -> Ranks:
    """A run of which each rank took so long for the steps of each variant."""

    def change(record: Record) -> Record:
        return replace(record, step_seconds=times[record.variant]) if isinstance(record, Steps) else record

    return bent(good_run(variants=dict.fromkeys(times, 0.05)), change)


@pytest.mark.parametrize(
    ("other", "named"),
    [([0.2] * 8, True), ([0.05, 0.2] * 4, False), ([0.2] * 3, False), ([0.1] * 8, False)],
    ids=["apart", "quartiles overlap", "too few", "alike"],
)
def test_a_fastest_is_named_only_where_quartiles_do_not_overlap(other: list[float], named: bool) -> None:
    shown = drawn(timed({"flat": [0.1] * 8, "ring": other}))
    assert ("per step of flat, the fastest written by hand" in shown) == named
    assert ("so none is the fastest" in shown.replace("of which none", "none")) != named


def test_the_slowest_of_the_picture_is_not_called_the_fastest() -> None:
    records = pipeline_run()
    timed = {"gpipe": [0.1] * 8, "1f1b": [0.2] * 8}

    def change(record: Record) -> Record:
        if isinstance(record, Steps):
            return replace(record, step_seconds=timed[record.variant])
        longer = isinstance(record, Timeline) and record.variant == "gpipe"
        return replace(record, spans=[[k, n, 2 * a, 2 * b] for k, n, a, b in record.spans]) if longer else record  # type: ignore[attr-defined]

    assert "per step of gpipe, the fastest" in drawn(
        bent(records, lambda each: each if isinstance(each, Timeline) else change(each))
    )
    assert "the fastest written" not in drawn(bent(records, change))


def test_the_page_has_a_table_of_contents_whose_links_lead_to_sections() -> None:
    shown = drawn(pipeline_run())
    links = re.findall(r'<li><a href="#([^"]+)">', shown)
    assert len(links) > 8 and len(set(links)) == len(links)
    assert all(f'<section id="{place}">' in shown for place in links)


def test_every_heading_of_a_column_has_a_scope_and_every_glossary_word_a_meaning() -> None:
    shown = drawn(pipeline_run())
    assert "<th>" not in shown and "<th class" not in shown
    assert re.search(r'<th scope="col" class=n title="median of the timed steps[^"]*">ms per step</th>', shown)
    assert re.search(r'title="by the formula, before the run">.B predicted</th>', shown)
    assert "<caption>Time and bytes of a step, by variant</caption>" in shown
    glossary = (Path(__file__).parents[3] / "docs" / "glossary.md").read_text()
    assert not [name for name, about in COLUMNS.items() if f"| {name} | {about} |" not in glossary]
