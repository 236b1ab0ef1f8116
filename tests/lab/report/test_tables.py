"""One table, twice: the log's text and the page's HTML have the same cells."""

import html
import re
from typing import Any

import pytest

from distlab.lab.report import tables
from distlab.lab.report.page import page
from distlab.lab.report.records import Check, Comparison, Profile, Ranks, Run
from distlab.lab.report.table import Column, Table, Verdict, Wrong
from distlab.lab.report.tables import LEGEND, rows, sign, staircases
from distlab.lab.report.timeline import Span
from distlab.lab.report.verdict import judge
from tests.lab.report.made_up import good_run, pipeline_run, plus, start, with_check, without

pytestmark = pytest.mark.timeout(60)

MADE = Table(
    [Column("what"), Column("number", "number"), Column("value", "value"), Column("why", in_log=False), Column("")],
    [
        ["a", "10", "2 of 3", "since", Verdict("passed", ", ± 1")],
        ["longer", "7", Wrong("11 of 3"), "", Verdict("FAILED")],
    ],
)


def tables_of(records: Ranks) -> list[Table]:
    run = judge(records)
    return [
        tables.proof(run), tables.timed(run), tables.measured(run, records), tables.memory(run, records),
        tables.profile(run, records, slowest_only=False), tables.checks(run["checks"][-1:]),
        tables.comparisons(run["comparisons"]),
    ]  # fmt: skip


def rows_of(shown: str) -> set[tuple[str, ...]]:
    rows = re.findall(r"<tr>(.*?)</tr>", shown)
    return {
        tuple(html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<td.*?>(.*?)</td>", row))
        for row in rows
    }


def test_the_log_aligns_columns_and_leaves_out_what_only_the_page_has() -> None:
    assert MADE.under("word") == [
        "word       what     number   value",
        "           a            10   2 of 3    passed, ± 1",
        "           longer        7   11 of 3   FAILED",
    ]
    assert MADE._replace(rows=[]).under("word") == []


def test_a_table_without_titles_names_its_numbers_in_each_row() -> None:
    made = Table([Column("what"), Column("predicted", inline="predicted ")], [["a", "1"]], titled=False)
    assert made.under("word") == ["word       a   predicted 1"]


@pytest.mark.parametrize(
    "records",
    [
        with_check(plus(good_run(), Check("ring", "timed losses", 2e-7, 1e-5)), "weights", 0.5),
        plus(pipeline_run(), Check("1f1b", "shards", 0.0, 0.0)),
    ],
    ids=["dp", "pp"],
)
def test_each_row_of_each_table_is_on_the_page_as_in_the_log(records: Ranks) -> None:
    shown = rows_of(page(judge(records), records))
    for table in tables_of(records):
        for row in table.rows:
            assert tuple(map(str, row)) in shown
            line = " ".join(table._replace(rows=[row], titled=True).under("")[-1].split())
            assert line == " ".join(
                " ".join(str(cell) for cell, column in zip(row, table.columns, strict=True) if column.in_log).split()
            )
    assert ("a", "row", "of nobody") not in shown


def test_a_number_that_failed_stands_out_on_the_page_and_others_do_not() -> None:
    assert page(judge(good_run()), good_run()).count('<b class="bad">') == 0
    failed = with_check(good_run(), "weights", 0.5)
    assert page(judge(failed), failed).count('<b class="bad">5.0e-01</b>') == 3


# The staircase to the letter, on steps small enough to draw by hand.


def test_two_stages_and_two_microbatches() -> None:
    """Forward 2 columns, backward 4: the bubble of rank 0 lies in the middle, that of rank 1 at both ends."""
    first = [Span("forward", "0", 0, 2), Span("forward", "1", 2, 4), Span("receive", "0", 4, 8)]
    first += [Span("backward", "0", 8, 12), Span("backward", "1", 14, 18), Span("optimizer", "", 18, 20)]
    last = [Span("receive", "0", 0, 2), Span("forward", "0", 2, 4), Span("backward", "0", 4, 8)]
    last += [Span("forward", "1", 8, 10), Span("backward", "1", 10, 14), Span("send", "1", 14, 15)]
    last += [Span("optimizer", "", 15, 17)]
    assert rows([first, last], columns=20) == [
        "rank 0 |0011....aaaa..bbbb++|",
        "rank 1 |..00aaaa11bbbb-++...|",
    ]


def test_the_inner_span_counts_and_the_longer_part_of_a_column() -> None:
    spans = [Span("forward", "3", 0.0, 8.0), Span("all_reduce", "", 2.0, 3.0), Span("wait", "", 4.0, 5.0)]
    spans += [Span("backward", "3", 8.0, 8.4), Span("optimizer", "", 9.0, 10.0)]
    assert rows([spans], columns=10) == ["rank 0 |33-3.333.+|"]
    assert rows([spans, []], columns=10)[1] == "rank 1 |..........|"


def test_numbers_and_letters_begin_anew() -> None:
    assert [sign(Span("forward", str(number), 0, 1)) for number in (0, 9, 10, 23)] == ["0", "9", "0", "3"]
    assert [sign(Span("weight", str(number), 0, 1)) for number in (0, 25, 26)] == ["A", "Z", "A"]
    assert [sign(Span("backward", str(number), 0, 1)) for number in (0, 25, 26)] == ["a", "z", "a"]
    assert sign(Span("forward", "", 0, 1)) == "0"


def test_every_variant_with_a_bubble_is_drawn() -> None:
    records = pipeline_run(2, 2, ("1f1b", "gpipe"))
    lines = list(staircases(judge(records), records))
    assert lines[0] == "1f1b: bubble 0.37 measured, 0.33 by (p-1)/(m+p-1)"
    assert lines[3].startswith("gpipe: bubble ")
    assert [line[:8] for line in lines[1:3] + lines[4:6]] == ["rank 0 |", "rank 1 |"] * 2
    assert {len(line) for line in lines[1:3]} == {len("rank 0 ||") + 64}
    assert lines[6:] == [LEGEND]


def test_without_a_bubble_nothing_is_drawn() -> None:
    records = without(Comparison, pipeline_run())
    assert list(staircases(judge(records), records)) == []


# Each decision of a table, by made-up entries of run.json whose numbers are all different.


def cells(table: Table) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in table.rows]


def entry(variant: str, name: str, off: float, tolerance: float, *, passed: bool = True, unit: str = "") -> Run:
    return {"variant": variant, "name": name, "max_abs_diff": off, "tolerance": tolerance, "passed": passed,
            "unit": unit, "detail": "why"}  # fmt: skip


def claim(variant: str, name: str, predicted: float, measured: float, tolerance: float, **fields: Any) -> Run:
    made = {"variant": variant, "name": name, "predicted": predicted, "measured": measured, "tolerance": tolerance,
            "unit": "B", "rank": 3, "decides": True, "passed": True, "formula": "2 x P"}  # fmt: skip
    return made | fields


def variant(name: str, **fields: Any) -> Run:
    made = {"name": name, "step_seconds": [0.02, 0.03], "cpu_seconds": [0.011, None, 0.022],
            "called_bytes": [1100.0, 1200.0], "wire_bytes": [1310.0, 1300.0], "peak_bytes": [None, None],
            "rest_by_class": [{"parameters": 2000, "gradients": 500}, {"parameters": 2100, "gradients": 600}],
            "peak_by_class": [{"parameters": 2000, "gradients": 900}, {"parameters": 2100, "gradients": 1400}]}  # fmt: skip
    return made | fields


MADE_RUN: Run = {"world_size": 2, "by_torch": ["ddp"], "checks": [], "comparisons": [], "variants": []}


def test_a_proof_shows_what_failed_and_which_tolerance_is_a_rows_own() -> None:
    checks = [
        entry("flat", "gradients", 1e-13, 1e-12), entry("flat", "weights", 2e-12, 1e-12, passed=False),
        entry("16", "gradients", 2.5, 8.0, unit="epsilons of bfloat16"), entry("16", "losses", 0.0, 1e-9),
        entry("16", "other", 7.0, 1.0),
        entry("same", "losses", 0.5, 1e-12, unit="parts of a loss"),
    ]  # fmt: skip
    table = tables.proof(MADE_RUN | {"checks": checks})
    assert cells(table) == [
        ["flat", "1.0e-13", "2.0e-12", "-", "FAILED"],
        ["16", "2.5e+00", "-", "0", "passed (tolerance 8 epsilons of bfloat16) (tolerance 1e-09 in float64)"],
        ["same", "-", "-", "5.0e-01", "passed (tolerance 1e-12 parts of a loss)"],
    ]
    assert [isinstance(cell, Wrong) for cell in table.rows[0][1:3]] == [False, True]
    assert table.columns[-1].title == "(tolerance 1e-12)"
    mixed = [entry("x", "gradients", 2.5, 8.0, unit="epsilons of bfloat16"), entry("x", "losses", 0.0, 1e-9)]
    assert tables.proof(MADE_RUN | {"checks": mixed}).columns[0].title == "against the reference"


def test_each_number_of_a_check_and_a_comparison_has_its_column() -> None:
    assert cells(tables.checks([entry("a", "sum", 0.25, 0.5)])) == [["a sum", "2.5e-01", "0.5", "passed", "why"]]
    made = [claim("a", "wire bytes", 100.0, 130.0, 20.0, passed=False),
            claim("b", "time", 1.0, 3.0, 4.0, decides=False, shown="a time")]  # fmt: skip
    assert cells(tables.comparisons(made)) == [
        ["a wire bytes", "100 B", "130 B", "3", "20 B", "FAILED", "2 x P"],
        ["b time", "1 B", "3 B", "3", "a time", "informational", "2 x P"],
    ]
    checks = [
        entry("a", "timed losses", 0.25, 0.5),
        entry("a", "timed steps", 0.0, 0.0),
        entry("b", "timed steps", 1.0, 0.0),
    ]
    table = tables.timed(MADE_RUN | {"checks": checks})
    assert cells(table) == [["a", "2.5e-01 / 5.0e-01", "0", "passed"], ["b", "-", "1.0e+00", "passed"]]
    assert table.columns[0].title == "difference / tolerance"
    assert "LAB_PROOF=0" in tables.timed(MADE_RUN | {"checks": checks[1:]}).columns[0].title


def records_of(*of_rank_1: Any) -> Ranks:
    return {0: [start(0, 2)], 1: [start(1, 2), *of_rank_1]}


def predicted(name: str, number: float, measured: float = 5.0, variant: str = "flat") -> Comparison:
    return Comparison(variant, name, "B", number, measured, 1.0)


def test_measured_is_the_slowest_rank_and_the_one_that_sends_most() -> None:
    claims = [claim("flat", "wire bytes", 1000.0, 1.0, 110.0), claim("flat", "called bytes", 1000.0, 1.0, 190.0),
              claim("flat", "called bytes", 1000.0, 1.0, 999.0, decides=False),
              claim("flat", "bubble", 1.0, 2.0, 0.0, passed=False)]  # fmt: skip
    run = MADE_RUN | {"variants": [variant("flat"), variant("ddp", step_seconds=[0.012, 0.01])], "comparisons": claims}
    records = records_of(
        predicted("wire bytes", 1010.0), predicted("called bytes", 1020.0), predicted("rest bytes", 9e9),
        predicted("wire bytes", 8e9, variant="ring"),
    )  # fmt: skip
    assert cells(tables.measured(run, records)) == [
        ["flat", "30.0", "2.50", "33.0", "1.02", "1.20", "1.31", "passed, ± 190 B"],
        ["ddp", "12.0", "1.00", "33.0", "-", "1.20", "1.31", ""],
    ]
    for tolerance, shown in ((100.0, "passed"), (101.0, "passed, ± 101 B")):
        narrow = run | {"comparisons": [claim("flat", "wire bytes", 1000.0, 1.0, tolerance)]}
        assert cells(tables.measured(narrow, records))[0][-1] == shown


def test_memory_is_of_the_fullest_rank_at_rest_and_at_the_peak() -> None:
    run = MADE_RUN | {
        "variants": [variant("flat")],
        "comparisons": [claim("flat", "rest bytes", 1.0, 1.0, 0.0, passed=False)],
    }
    process = [predicted("process bytes", 1.0, 3300.0), predicted("process peak bytes", 1.0, 4400.0)]
    records = records_of(predicted("rest bytes", 2710.0, 9e9), *process, predicted("rest bytes", 9e9, variant="ring"))
    records[0].append(predicted("rest bytes", 8e9))
    table = tables.memory(run, records)
    assert cells(table) == [["flat", "2.10", "0.600 / 1.40", "2.70 / 3.50", "2.71", "3.30 / 4.40", "FAILED"]]
    assert [column.title for column in table.columns] == [
        "kB at rest / at the peak", "parameters", "gradients", "total", "rest by formula", "process", "",
    ]  # fmt: skip
    big = {"rest_by_class": [{"parameters": 2_000_000, "optimizer": 0}, {"parameters": 1}],
           "peak_by_class": [{"parameters": 2_000_000, "optimizer": 700_000}, {"parameters": 1}]}  # fmt: skip
    records[0].append(predicted("rest bytes", 2_100_000.0, variant="big"))
    records[1].append(predicted("rest bytes", 9.0, variant="big"))
    table = tables.memory(run | {"variants": [variant("flat"), variant("big", **big)]}, records)
    assert [column.title for column in table.columns][:4] == [
        "MB at rest / at the peak", "parameters", "gradients", "total",
    ]  # fmt: skip
    assert cells(table)[1] == ["big", "2.00", "-", "2.00 / 2.70", "2.10", "-", "0 / 0.700", ""]
    assert tables.fullest([None, {"a": 3}, {"a": 1, "b": 3}, {}]) == 2
    assert tables.fullest([None, {}]) is None


def test_planned_is_beside_measured() -> None:
    run = MADE_RUN | {"variants": [variant("flat"), variant("ring"), variant("zero", step_seconds=[None])]}
    plan = tables.Plan({"flat": (0.045, 2800.0), "zero": (1.0, 1.0)}, [])
    assert cells(tables.planned(run, plan)) == [["flat", "45.0", "30.0", "+50%", "2.80 kB", "3.50 kB", "-20%"]]


def test_a_profile_names_the_rank_with_most_work_of_its_own() -> None:
    slow = {
        "data": 0.001,
        "forward": 0.01,
        "backward": 0.02,
        "communication": 0.003,
        "optimizer": 0.004,
        "waiting": 0.003,
    }
    fast = slow | {"backward": 0.0025, "waiting": 0.0325}  # longer, and 17.5 ms of work instead of 35
    run = MADE_RUN | {"by_torch": ["ddp"]}
    records = records_of(Profile("flat", slow), Profile("ddp", slow | {"communication": 0.0, "optimizer": 0.0}))
    records[0].append(Profile("flat", fast))
    assert tables.slowest_rank([fast, None, slow]) == (2, 2.0)
    assert tables.slowest_rank([{"waiting": 1.0}, slow]) == (1, float("inf"))
    assert cells(tables.profile(run, records, slowest_only=False)) == [
        ["flat", "rank 0", "53.0", "1.00 (2)", "10.0 (19)", "2.50 (5)", "3.00 (6)", "4.00 (8)", "32.5 (61)", ""],
        ["flat", "rank 1", "41.0", "1.00 (2)", "10.0 (24)", "20.0 (49)", "3.00 (7)", "4.00 (10)", "3.00 (7)", "2.00 ×"],
        ["ddp", "rank 1", "34.0", "1.00 (3)", "10.0 (29)", "20.0 (59)", "not visible", "-", "3.00 (9)", "1.00 ×"],
    ]
    assert [row[1] for row in cells(tables.profile(run, records, slowest_only=True))] == ["rank 1", "rank 1"]
    single = {0: [start(0, 1), Profile("flat", slow)]}
    assert cells(tables.profile(run | {"world_size": 1}, single, slowest_only=True))[0][-1] == ""


@pytest.mark.parametrize(
    ("claims", "word"),
    [
        ([], ""), ([entry("a", "b", 0.0, 0.0)], "passed"),
        ([entry("a", "b", 0.0, 0.0), entry("a", "c", 9.0, 0.0, passed=False)], "FAILED"),
        ([claim("a", "b", 1.0, 2.0, 0.0, decides=False)], "informational"),
        ([claim("a", "b", 1.0, 2.0, 0.0, decides=False), claim("a", "c", 1.0, 1.0, 0.0)], "passed"),
    ],
)  # fmt: skip
def test_one_word_for_several_claims(claims: list[Run], word: str) -> None:
    assert tables.verdict(claims) == word
