"""One table, twice: the log's text and the page's HTML have the same cells."""

import html
import re

import pytest

from distlab.report import tables
from distlab.report.page import page
from distlab.report.records import Check, Comparison, Ranks
from distlab.report.table import Column, Table, Verdict, Wrong, table_lines
from distlab.report.tables import LEGEND, rows, sign, staircases
from distlab.report.timeline import Span
from distlab.report.verdict import judge
from tests.report.made_up import good_run, pipeline_run, plus, with_check, without

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
        tables.profile(run, records, slowest_only=False), tables.hidden(run, records), tables.checks(run["checks"][-1:]),
        tables.comparisons(run["comparisons"]),
    ]  # fmt: skip


def rows_of(shown: str) -> set[tuple[str, ...]]:
    rows = re.findall(r"<tr>(.*?)</tr>", shown)
    return {
        tuple(html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<td.*?>(.*?)</td>", row))
        for row in rows
    }


def test_the_log_aligns_columns_and_leaves_out_what_only_the_page_has() -> None:
    assert table_lines("word", MADE) == [
        "word       what     number   value",
        "           a            10   2 of 3    passed, ± 1",
        "           longer        7   11 of 3   FAILED",
    ]
    assert table_lines("word", MADE._replace(rows=[])) == []


def test_a_table_without_titles_names_its_numbers_in_each_row() -> None:
    made = Table([Column("what"), Column("predicted", inline="predicted ")], [["a", "1"]], titled=False)
    assert table_lines("word", made) == ["word       a   predicted 1"]


@pytest.mark.parametrize(
    "records",
    [
        with_check(plus(good_run(), Check("ring", "timed losses", 2e-7, 1e-5)), "weights", 0.5),
        plus(pipeline_run(), Check("1f1b", "shards", 0.0, 0.0)),
    ],
    ids=["dp", "pp"],
)
def test_each_row_of_each_table_stands_on_the_page_as_in_the_log(records: Ranks) -> None:
    shown = rows_of(page(judge(records), records))
    for table in tables_of(records):
        for row in table.rows:
            assert tuple(map(str, row)) in shown
            line = " ".join(table_lines("", table._replace(rows=[row], titled=True))[-1].split())
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
