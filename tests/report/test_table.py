"""One table, twice: the log's text and the page's HTML have the same cells."""

import html
import re

import pytest

from distlab.report import tables
from distlab.report.page import page
from distlab.report.records import Check, Ranks
from distlab.report.table import Column, Table, Verdict, Wrong, table_lines
from distlab.report.verdict import judge
from tests.report.made_up import good_run, pipeline_run, plus, with_check

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
