"""The expected effect of a fault beside the observed one: from records alone, right and wrong."""

from typing import Any

import pytest
from msgspec.structs import replace

from distlab.lab.rank.mode_loader import load
from distlab.lab.report.fault_checks import CONTROL, SHOULD, fault_sentence
from distlab.lab.report.reading import from_line, to_line
from distlab.lab.report.records import (
    End,
    Failed,
    Injected,
    Left,
    Lost,
    Planned,
    Ranks,
    Record,
    Start,
)
from distlab.lab.report.verdict import judge
from tests.controls import control_exists
from tests.documents import TOP
from tests.lab.report.made_up import good_run

pytestmark = pytest.mark.timeout(60)
SENTENCE = "rank 1 lost at step 3 in flat: no heartbeat for 3.3 s"
FULL = "rank 1 failed at step 3 in flat: Unwritable: the run cannot be written any more (No space left on device)"
AT = 1000.0


def plan(outcome: str, kind: str = "kill", bound_s: float = 5.0, step: int | None = 3) -> Planned:
    return Planned(0, f"{kind} rank 1 at step 3", kind, 1, outcome, bound_s, step)


def made(**fields: Any) -> Injected:
    return replace(Injected(0, 1, 3, "", AT), **fields)


def run(planned: Planned, *of_rank_1: Record, of_ranks: dict[int, list[Record]] | None = None) -> Ranks:
    """The records of four ranks, all of which have the plan; rank 1 made the fault."""
    found = {rank: [*of_rank, planned] for rank, of_rank in good_run().items()}
    found[1] += of_rank_1
    for rank, records in (of_ranks or {}).items():
        found[rank] = [each for each in found[rank] if not isinstance(each, End)]
        found[rank] += records
    return {rank: [from_line(to_line(each)) for each in of_rank] for rank, of_rank in found.items()}


def ended(code: int = 3, sentence: str = SENTENCE, after_s: float = 3.4) -> list[Record]:
    return [Lost(1, 3, "no heartbeat for 3.3 s"), Failed(code, sentence, AT + after_s)]


def result(records: Ranks) -> bool | None:
    (drill,) = judge(records)["drills"]
    result: bool | None = drill["held"]
    return result


SURVIVORS = (0, 2, 3)
OTHER = "rank 2 lost at step 3 in flat: no heartbeat for 3.3 s"


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        ({rank: ended() for rank in SURVIVORS}, True),
        ({}, False),  # nobody was named
        ({rank: ended(sentence=OTHER) for rank in SURVIVORS}, False),
        ({0: ended(), 2: ended(), 3: ended(sentence=f"{SENTENCE}, and more")}, False),  # not all say the same
        ({0: ended(), 2: ended(), 3: ended(code=1)}, False),
        ({0: ended(), 2: ended(), 3: ended(after_s=5.1)}, False),
    ],
    ids=["named", "nobody", "another", "not the same", "another code", "late"],
)
def test_a_lost_rank_is_named_by_all_in_time(of_ranks: dict[int, list[Record]], expected: bool) -> None:
    assert result(run(plan("lost"), made(), of_ranks=of_ranks)) is expected


def test_where_ranks_may_leave_the_others_go_on() -> None:
    left: list[Record] = [Left(1, 3, "no heartbeat; the remaining ranks continued")]
    records = run(plan("lost"), made())
    records[0] += left
    assert result(records) is True


def test_of_two_that_are_cut_each_names_the_other() -> None:
    both = {
        0: ended(),
        1: ended(
            sentence="rank 1 is partitioned from the cluster at step 3 in flat: no heartbeat from rank 0 for 3.3 s"
        ),
    }
    records = run(plan("lost", "cut"), made(), of_ranks=both)
    two: Ranks = {
        rank: [replace(each, world_size=2) if isinstance(each, Start) else each for each in records[rank]]
        for rank in (0, 1)
    }
    assert result(two) is True


@pytest.mark.parametrize(("of_ranks", "expected"), [({}, True), ({rank: ended() for rank in SURVIVORS}, False)])
def test_a_short_pause_is_survived(of_ranks: dict[int, list[Record]], expected: bool) -> None:
    assert result(run(plan("survived", "pause"), made(), of_ranks=of_ranks)) is expected


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        ({rank: ended(1, FULL) for rank in SURVIVORS}, True),
        ({0: ended(1, FULL), 2: ended(1, FULL), 3: ended(3, FULL)}, False),
        ({rank: ended(1, "rank 1 failed at step 3 in flat: ValueError") for rank in SURVIVORS}, False),
        ({}, False),
    ],
)
def test_a_full_disk_is_reported_in_one_sentence(of_ranks: dict[int, list[Record]], expected: bool) -> None:
    assert result(run(plan("full", "full_disk"), made(), of_ranks=of_ranks)) is expected


def test_a_fault_that_never_came() -> None:
    assert control_exists(CONTROL, load("dp"))
    assert result(run(plan("lost"))) is False
    assert result(run(plan("lost", step=None))) is None  # its second was after the end
    assert (
        result(run(plan("lost"), of_ranks={rank: ended() for rank in SURVIVORS})) is None
    )  # another ended the run before


def test_a_fault_that_is_no_longer_checked_has_no_result() -> None:
    """Of run folders of before: a flipped bit had to be seen, a damaged checkpoint refused."""
    for outcome, kind in (("seen", "flip"), ("named", "flip"), ("refused", "corrupt_checkpoint")):
        assert result(run(plan(outcome, kind), made(detail="weights.w[0] bit 31: 1 became -1"))) is None


def test_an_open_outcome_checks_nothing_and_every_outcome_has_a_description() -> None:
    assert result(run(plan("open", "pause"), made())) is None
    for outcome in SHOULD:
        assert SHOULD[outcome] in fault_sentence(judge(run(plan(outcome)))["drills"][0]) or "{" in SHOULD[outcome]


def test_a_drill_is_in_run_json_with_what_should_and_what_did() -> None:
    (drill,) = judge(run(plan("lost"), made(), of_ranks={rank: ended() for rank in SURVIVORS}))["drills"]
    assert drill["event"] == "kill rank 1 at step 3"
    assert drill["should"] == "named by every survivor within 5 s, exit code 3"
    assert drill["did"] == f"rank 1 named by 3 after 3.4 s, exit code 3: {SENTENCE}"
    assert fault_sentence(drill).endswith("(as expected)")
    assert judge(good_run())["drills"] == []


def test_the_line_of_the_page_is_that_of_the_report() -> None:
    """A killed rank is lost at another step in each run: it depends on its last heartbeat."""
    sentence = "rank 1 lost at step 2 in the wait at step 2 of flat: killed by SIGKILL"
    records = run(plan("lost"), made(), of_ranks={rank: ended(sentence=sentence, after_s=0.6) for rank in (0, 2)})
    (drill,) = judge({rank: of_rank for rank, of_rank in records.items() if rank < 3})["drills"]
    shown = (TOP / "docs" / "reliability.md").read_text()
    assert f"\nrank 0 | fault      {fault_sentence(drill)}\n" in shown
