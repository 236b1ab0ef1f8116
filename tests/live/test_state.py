"""The folder of a run as a snapshot: who is lost and how soon, what the others say of it, and the verdict."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from distlab.live.state import Reader, Shown, Snapshot, Tail, curves, matrix
from distlab.report import progress
from distlab.report.reading import to_line
from distlab.report.records import Changed, End, Failed, Left, Losses, Lost, Said
from distlab.report.verdict import judge, write_run
from tests.live.states import BEGAN_AT, recorded, run_of, state
from tests.report.made_up import good_run

pytestmark = pytest.mark.timeout(60)

BOUND_S = 3.0  # of the issue


def hows(snapshot: Snapshot) -> list[str]:
    return [each.how for each in snapshot.ranks]


def test_a_rank_that_stops_writing_is_lost_within_three_seconds_and_no_other(tmp_path: Path) -> None:
    reader = Reader(run_of(tmp_path, state(0), state(1), state(2)))
    assert hows(reader.snapshot(100.0)) == ["running"] * 3
    beat = 1
    for tick in range(1, 12):  # of a quarter of a second: rank 1 says nothing any more
        beat += 1
        run_of(tmp_path, state(0, beat), state(2, beat))
        snapshot = reader.snapshot(100.0 + tick * progress.PERIOD_S)
        if tick == 6:
            assert hows(snapshot) == ["running"] * 3
    assert hows(snapshot) == ["running", "lost", "running"]
    assert snapshot.clock_s - 100.0 < BOUND_S
    assert snapshot.ranks[1].reason == "nothing written for 2.8 s"
    assert (snapshot.verdict, snapshot.sentence) == ("lost", "rank 1 is lost")


def test_a_rank_that_was_held_up_comes_back(tmp_path: Path) -> None:
    reader = Reader(run_of(tmp_path, state(0), state(1), state(2)))
    reader.snapshot(100.0)
    assert hows(reader.snapshot(109.0)) == ["lost"] * 3
    run_of(tmp_path, state(1, beat=2))
    assert hows(reader.snapshot(109.25)) == ["lost", "running", "lost"]


def test_a_broken_file_is_named_and_what_was_known_stays(tmp_path: Path) -> None:
    reader = Reader(run_of(tmp_path, state(0), state(1), state(2)))
    before = reader.snapshot(100.0)
    progress.status_path(tmp_path, 1).write_text('{"rank": 1, "wor')
    (tmp_path / "rank2.jsonl").write_text('{"record": "lost", "ra\n')
    snapshot = reader.snapshot(101.0)
    assert hows(snapshot) == hows(before) == ["running"] * 3
    assert [fault.partition(" is not ")[0] for fault in snapshot.faults] == ["live.rank1.json", "a line of rank2.jsonl"]
    json.dumps(asdict(snapshot), allow_nan=False)


def test_whom_a_rank_waits_for_and_what_it_does(tmp_path: Path) -> None:
    run_of(tmp_path, state(0, waits_for=[2], phase="all_reduce", phase_s=1.25), state(1), state(2))
    reader = Reader(tmp_path)
    reader.snapshot(100.0)
    (row, *_) = reader.snapshot(101.5).ranks
    assert row == Shown(
        0, "waiting", "", "worker0", 100, "ring", "ring", 4, 20, "all_reduce", phase_s=2.75, waits_for=[2]
    )


def test_what_the_others_wrote_of_a_rank_counts_at_once(tmp_path: Path) -> None:
    run_of(tmp_path, state(0), state(1), state(2))
    recorded(tmp_path, 0, Lost(1, 4, "no heartbeat for 2.6 s"), Failed(3, "rank 1 lost at step 4"))
    recorded(tmp_path, 2, Left(0, 4, "it ended; the remaining ranks continued"))
    ranks = Reader(tmp_path).snapshot(100.0).ranks
    assert [(each.how, each.reason) for each in ranks] == [
        ("lost", "it ended; the remaining ranks continued"), ("lost", "no heartbeat for 2.6 s"), ("running", ""),
    ]  # fmt: skip


def test_a_survivor_that_has_said_why_it_ends_is_not_lost(tmp_path: Path) -> None:
    run_of(tmp_path, state(0), state(1), state(2))
    recorded(tmp_path, 0, Failed(3, "rank 1 lost at step 4"))
    recorded(tmp_path, 2, End(2, 0.0, None, 1.0, 0.0))
    reader = Reader(tmp_path)
    assert hows(reader.snapshot(100.0)) == ["ended", "running", "running"]  # rank 2 may still draw the report
    late = reader.snapshot(103.0)
    assert hows(late) == ["ended", "lost", "ended"]
    assert late.ranks[0].reason == "rank 1 lost at step 4"


def test_a_rank_that_wrote_nothing_is_unseen(tmp_path: Path) -> None:
    run_of(tmp_path, state(0), state(2))
    assert hows(Reader(tmp_path).snapshot(100.0)) == ["running", "unseen", "running"]


def test_the_verdict_is_that_of_this_attempt(tmp_path: Path) -> None:
    run_of(tmp_path, state(0), state(1), state(2))
    write_run(tmp_path, judge(good_run(3)))
    snapshot = Reader(tmp_path).snapshot(100.0)
    assert snapshot.verdict == "pass"
    assert snapshot.sentence.endswith("checks passed")
    os.utime(tmp_path / "run.json", (BEGAN_AT - 1, BEGAN_AT - 1))  # that of the attempt before
    assert Reader(tmp_path).snapshot(100.0).verdict == "running"
    os.utime(tmp_path / "run.json", (BEGAN_AT + 1, BEGAN_AT + 1))
    (tmp_path / "run.json").write_text('{"verdict": "pass"')
    broken = Reader(tmp_path).snapshot(100.0)
    assert broken.verdict == "running"
    assert broken.faults[0].startswith("run.json is not the verdict of a run")


def test_ranks_of_a_larger_attempt_before_are_not_shown(tmp_path: Path) -> None:
    run_of(tmp_path, *(state(rank, world_size=2, began_at=BEGAN_AT + 9) for rank in (0, 1)), state(2))
    assert [each.rank for each in Reader(tmp_path).snapshot(100.0).ranks] == [0, 1]


def test_curves_that_rank_0_has_written_take_the_place_of_the_live_ones(tmp_path: Path) -> None:
    run_of(tmp_path, state(0, losses={"ring": [[0, 3.0]], "flat": [[0, 4.0]]}), state(1), state(2))
    recorded(tmp_path, 0, Losses("ring", [3.0, float("nan")]), Losses("one process", [3.0, 2.0]))
    losses = Reader(tmp_path).snapshot(100.0).losses
    assert losses == {"flat": [[0, 4.0]], "ring": [[0, 3.0], [1, None]], "one process": [[0, 3.0], [1, 2.0]]}
    recorded(tmp_path, 0, Losses("ring", [1.0] * 20_000))
    assert len(Reader(tmp_path).snapshot(100.0).losses["ring"]) == 250


def test_a_folder_without_states_waits(tmp_path: Path) -> None:
    assert Reader(tmp_path).snapshot(100.0) == Snapshot(100.0)


# The records of a rank while it writes them: no line twice, none by half, and another attempt anew.


LOST, FAILED = Lost(2, 17, "no heartbeat for 2.6 s"), Failed(3, "rank 2 lost")


def test_lines_are_taken_when_they_are_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    half = to_line(FAILED)
    path.write_text(to_line(Said("predict", "much")) + "\n" + to_line(LOST) + "\n" + half[:9])
    assert tail.read() == tail.read() == [LOST]
    with path.open("a") as file:
        file.write(half[9:] + "\n")
    assert tail.read() == [LOST, FAILED]


def test_another_attempt_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(to_line(LOST) + "\n")
    tail = Tail(path)
    assert tail.read() == [LOST]
    path.rename(tmp_path / "rank0.attempt1.jsonl")
    assert tail.read() == []
    path.write_text(to_line(FAILED) + "\n")
    assert tail.read() == [FAILED]


def test_a_broken_line_is_named_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"record": "lost", "rank": tw\n' + to_line(LOST) + "\n")
    tail = Tail(path)
    assert tail.read() == [LOST]
    (fault,) = tail.faults
    assert fault.startswith("a line of rank0.jsonl is not a record of the lab")


# What several ranks' states say together: losses of the batch, and who sent how much to whom.


def test_a_loss_is_the_sum_of_all_shares_at_steps_that_all_have_noted() -> None:
    states = {
        0: state(0, losses={"ring": [[0, 1.0], [2, 0.5], [4, 0.25]], "flat": [[0, 9.0]]}),
        1: state(1, losses={"ring": [[0, 2.0], [2, 1.5]], "flat": [[0, None]]}),
        2: state(2),  # a stage that sees no loss
    }
    assert curves(states) == {"ring": [[0, 3.0], [2, 2.0]], "flat": [[0, None]]}


A, B, C = (["10.0.0.1", 500], ["10.0.0.2", 500], ["10.0.0.3", 500])


def test_a_peer_is_named_by_both_ends_of_a_connection() -> None:
    """Local ranks share an address, and a port may be that of two connections that lead to different places."""
    states = {
        0: state(0, sent=[[A, B, 100], [A, C, 30], [["10.0.0.1", 501], B, 5]]),
        1: state(1, sent=[[B, A, 7], [B, ["10.0.0.1", 501], 1], [B, ["10.0.0.9", 29500], 1000]]),
        2: state(2, sent=[[C, A, 2]]),
    }
    assert matrix(states, 3) == [[None, 105, 30], [8, None, 0], [2, 0, None]]


def test_a_rank_that_measures_nothing_has_no_numbers() -> None:
    states = {0: state(0, unmeasured="no counters here"), 1: state(1, sent=[[B, A, 7]])}
    assert matrix(states, 3) == [[None] * 3] * 3


def test_a_rank_that_is_no_member_any_more_is_out_though_its_process_lives(tmp_path: Path) -> None:
    folder = run_of(tmp_path, state(0), state(1), state(2))
    recorded(folder, 0, Changed("ring", 3, 10.0, "lost", [0, 2]))
    reader = Reader(folder)
    shown = reader.snapshot(0.0)
    assert [(each.how, each.reason) for each in shown.ranks] == [
        ("running", ""), ("out", "no member of ring since step 3"), ("running", ""),
    ]  # fmt: skip
    assert shown.verdict == "running"
    recorded(folder, 0, Changed("ring", 3, 10.0, "lost", [0, 2]), Changed("ring", 5, 11.0, "asked", [0, 2, 1]))
    assert [each.how for each in Reader(folder).snapshot(0.1).ranks] == ["running"] * 3
    recorded(folder, 0, Changed("naive", 3, 12.0, "lost", [0, 2]))  # of a variant that is over
    assert [each.how for each in Reader(folder).snapshot(0.2).ranks] == ["running"] * 3


def test_progress_is_that_of_the_lowest_rank_that_lives(tmp_path: Path) -> None:
    folder = run_of(tmp_path, state(0), state(1, progress="(3 of 6 steps), 2 s, about 2 s left", share=0.5), state(2))
    recorded(folder, 1, Lost(0, 4, "its connection closed"))
    reader = Reader(folder)
    assert reader.snapshot(0.0).progress == ""  # a run that lost a rank is over
    recorded(folder, 1)
    run_of(tmp_path, state(0, beat=2, progress="(4 of 6 steps), 2 s, about 1 s left", share=4 / 6))
    seen = Reader(folder).snapshot(0.1)
    assert (seen.progress, seen.share) == ("(4 of 6 steps), 2 s, about 1 s left", 4 / 6)
