"""A check that vanishes is missed: the claims that its settings require are compared with those that it made."""

from typing import Any

import pytest
from msgspec.structs import replace

from distlab.lab.report.records import Check, Comparison, Expected, Left, Ranks, Record, Skipped, Start, Waived
from distlab.lab.report.verdict import exit_code, judge
from tests.lab.report.made_up import good_run

CHECK, BYTES = Check("flat", "timed losses", 0.0, 1e-6), Comparison("flat", "wire bytes", "B", 8.0, 8.0, 0.0)


def run_of(needs: list[list[Any]], of_ranks: dict[int, list[Record]], world_size: int = 3) -> dict[str, Any]:
    """A run that needs these claims, and of each rank what it wrote beside."""
    records: Ranks = {}
    for rank, of_rank in good_run(world_size).items():
        start = of_rank[0]
        assert isinstance(start, Start)
        begun: list[Record] = [replace(start, says_claims=True), Expected(needs)]
        records[rank] = [*begun, *of_ranks.get(rank, []), *of_rank[1:]]
    return judge(records)


def missing_claims(run: dict[str, Any]) -> list[tuple[str, str]]:
    """What was missed, by variant."""
    return [(check["variant"], check["detail"]) for check in run["checks"] if check["name"] == "claims"]


def test_a_claim_that_vanishes_is_missed() -> None:
    assert missing_claims(run_of([["flat", "timed losses", 1, True]], {0: [CHECK]})) == []
    run = run_of([["flat", "timed losses", 1, True]], {})
    assert (run["verdict"], exit_code(run)) == ("fail", 1)
    assert missing_claims(run) == [
        ("flat", "these settings require the check 'timed losses' from some rank, but it is missing")
    ]


def test_a_claim_of_each_rank_is_missed_on_one() -> None:
    needs: list[list[Any]] = [["flat", "wire bytes", 1, False]]
    assert missing_claims(run_of(needs, {0: [BYTES], 1: [BYTES], 2: [BYTES]})) == []
    assert missing_claims(run_of(needs, {0: [BYTES], 2: [BYTES]})) == [
        ("flat", "these settings require the check 'wire bytes' from rank 1, but it is missing")
    ]


def test_a_claim_that_is_made_too_rarely_is_missed() -> None:
    run = run_of([["flat", "timed losses", 3, True]], {0: [CHECK, CHECK]})
    assert missing_claims(run) == [
        ("flat", "these settings require the check 'timed losses' from some rank 3 times, but there are 2")
    ]


def test_what_another_rank_made_before_it_left_is_there() -> None:
    run = run_of([["flat", "timed losses", 1, True]], {1: [Left(0, 0, "silent")], 0: [CHECK]})
    assert missing_claims(run) == []


@pytest.mark.parametrize(
    "excused",
    [
        Skipped("flat", "it cannot take these sizes"),
        Waived("flat", "wire bytes", "nobody knows the wire"),
        Waived("", "wire ", "nobody knows the wire"),
    ],
)
def test_a_waived_claim_is_not_missed(excused: Record) -> None:
    assert missing_claims(run_of([["flat", "wire bytes", 1, False]], {rank: [excused] for rank in range(3)})) == []


def test_a_run_without_its_list_of_claims_fails() -> None:
    records = good_run(3)
    records = {
        rank: [replace(of[0], says_claims=True), *of[1:]] for rank, of in records.items() if isinstance(of[0], Start)
    }
    assert missing_claims(judge(records)) == [("", "no rank has recorded which checks these settings require")]
    assert judge(records)["verdict"] == "fail"


def test_a_run_of_a_lab_that_wrote_no_claims_is_judged_as_it_was() -> None:
    assert judge(good_run(3))["verdict"] == "pass"
