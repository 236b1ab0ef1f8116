"""Words and records of a rank: nothing before a run is accepted, everything after."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.report import run_folder as claims
from distlab.lab.report.reading import read_records, read_run
from distlab.lab.report.records import End, Said
from distlab.lab.report.run_folder import (
    STALE_S,
    FolderInUse,
    Journal,
    Level,
    Outcome,
    Unpublished,
    Unwritable,
    claim,
    is_running,
    point_latest,
    put_aside,
    ranks_beyond,
)


def test_a_refused_run_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal().say("waiting for rank 2")
    assert capsys.readouterr().out == "waiting for rank 2\n"
    assert list(tmp_path.iterdir()) == []


def test_lines_from_before_the_run_are_in_its_log(tmp_path: Path) -> None:
    journal = Journal()
    journal.say("early")
    journal.open(tmp_path / "run", rank=1)
    journal.say("late")
    assert (tmp_path / "run" / "rank1.log").read_text() == "early\nlate\n"


@pytest.mark.parametrize(("level", "count"), [("quiet", 1), ("normal", 2), ("full", 3)])
def test_a_line_of_a_higher_level_is_neither_printed_nor_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: Level, count: int
) -> None:
    journal = Journal(level)
    journal.open(tmp_path / "run", rank=0)
    journal.say("FAILED     a check")
    journal.say("working    on it", "normal")
    journal.say("checks     a table", "full")
    expected = ["FAILED     a check", "working    on it", "checks     a table"][:count]
    assert capsys.readouterr().out.splitlines() == expected
    assert (tmp_path / "run" / "rank0.log").read_text().splitlines() == expected


def test_a_record_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    journal = Journal()
    journal.open(tmp_path, rank=0)
    for record in (Said("predict", "2(N-1)/N · S"), End(0, 1.0, None, 2.5, 0.0)):
        journal.write(record)
    assert (
        read_records(tmp_path / "rank0.jsonl")
        == journal.records
        == [Said("predict", "2(N-1)/N · S"), End(0, 1.0, None, 2.5, 0.0)]
    )


def test_a_full_disk_is_one_sentence_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal()
    journal.open(tmp_path, rank=0)
    journal.write(End(0, 1.0, None, 2.0, 0.0))
    write = os.write
    monkeypatch.setattr("os.write", lambda file, data: write(file, data[:5]))  # what a nearly full disk does
    with pytest.raises(Unwritable, match="No space left on device"):
        journal.write(End(0, 1.0, None, 3.0, 0.0))
    monkeypatch.undo()
    assert read_records(tmp_path / "rank0.jsonl") == [End(0, 1.0, None, 2.0, 0.0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_refuses_is_the_same_sentence(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    journal = Journal()
    journal.open(tmp_path, rank=0)
    with pytest.raises(Unwritable, match="No space left on device"):
        journal.say("one line too many")


def test_a_run_that_goes_on_keeps_its_log_and_puts_the_records_of_before_aside(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        journal = Journal()
        journal.open(tmp_path, rank=0)
        journal.say(f"words of attempt {attempt}")
        journal.write(Said("attempt", str(attempt)))
    lines = (tmp_path / "rank0.log").read_text().splitlines()
    assert lines[::2] == [f"words of attempt {attempt}" for attempt in (1, 2, 3)]
    assert lines[1::2] == [f"again      attempt {attempt} of this run" for attempt in (2, 3)]
    assert read_run(tmp_path) == {0: [Said("attempt", "3")]}
    assert [read_records(tmp_path / f"rank0.attempt{attempt}.jsonl") for attempt in (1, 2)] == [
        [Said("attempt", "1")],
        [Said("attempt", "2")],
    ]


def test_records_of_ranks_that_are_no_more_are_put_aside(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        Journal().open(tmp_path, rank)
    put_aside(tmp_path, ranks_beyond(tmp_path, 2))
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "rank0.jsonl",
        "rank1.jsonl",
        "rank2.attempt1.jsonl",
    ]


# One run a folder: the second is refused, and the next attempt waits for the end of the one before.


def test_all_ranks_of_a_run_claim_its_folder(tmp_path: Path) -> None:
    files = [claim(tmp_path / "run", "token", goes_on=False) for _ in range(3)]
    assert is_running(tmp_path / "run")
    for file in files:
        os.close(file)
    assert not is_running(tmp_path / "run")


def test_of_two_runs_that_begin_at_once_one_has_the_folder(tmp_path: Path) -> None:
    """Four ranks each, all at the same moment."""

    def begin(token: str) -> str:
        try:
            claim(tmp_path / "run", token, goes_on=False)
        except FolderInUse:
            return "refused"
        return token

    for number in range(5):
        tokens = [f"{number}a", f"{number}b"] * 4
        (tmp_path / "run" / claims.FILE).unlink(missing_ok=True)
        with ThreadPoolExecutor(8) as ranks:
            ended = list(zip(tokens, ranks.map(begin, tokens), strict=True))
        winner = (tmp_path / "run" / claims.FILE).read_text()
        assert all(result == (token if token == winner else "refused") for token, result in ended)


def test_a_resumed_run_takes_over_a_folder_that_no_rank_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "ENDED_WITHIN_S", 0.3)
    before = claim(tmp_path / "run", "first", goes_on=False)
    with pytest.raises(FolderInUse):
        claim(tmp_path / "run", "second", goes_on=True)
    os.close(before)
    for _ in range(2):
        claim(tmp_path / "run", "second", goes_on=True)
    with pytest.raises(FolderInUse):
        claim(tmp_path / "run", "third", goes_on=False)


# The link to the newest run, whatever stands beside it.


def test_latest_is_the_newest_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        point_latest(tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "second"]


def test_a_draft_that_a_killed_process_left_does_not_matter_and_goes_when_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / ".latest.7", tmp_path / f".latest.{os.getpid()}"
    for draft in (old, young):
        draft.symlink_to("gone")
    then = time.time() - 2 * STALE_S
    os.utime(old, (then, then), follow_symlinks=False)
    point_latest(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, "latest"]


# What became of a run is written once: the first word stays, whoever comes later, and however it was laid ready.


def published(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def test_the_first_outcome_stays(tmp_path: Path) -> None:
    one, other = Outcome(tmp_path / "run", "a"), Outcome(tmp_path / "run", "a")
    one.folder.mkdir()
    assert not one.claimed()
    assert one.write({"verdict": "lost"})
    assert other.claimed()
    assert not other.write({"verdict": "pass"})
    other.prepare({"verdict": "pass"}, 0)
    with pytest.raises(Unpublished, match=r"run.json has another verdict than that of rank 0"):
        other.publish(0)
    assert published(one.folder) == {"verdict": "lost"}


def test_a_prepared_verdict_is_published_by_any_rank_with_its_report(tmp_path: Path) -> None:
    one, other = Outcome(tmp_path / "run", "a"), Outcome(tmp_path / "run", "a")
    one.folder.mkdir()
    one.prepare({"verdict": "pass"}, 0)
    one.page(0).write_text("the page")
    assert not (one.folder / "run.json").exists() and not (one.folder / "report.html").exists()
    other.publish(0)
    one.publish(0)
    assert published(one.folder) == {"verdict": "pass"}
    assert (one.folder / "report.html").read_text() == "the page"
    assert (tmp_path / "latest").resolve() == one.folder


def test_another_attempt_has_an_outcome_of_its_own(tmp_path: Path) -> None:
    for token, verdict in (("a", "lost"), ("b", "pass")):
        outcome = Outcome(tmp_path / "run", token)
        outcome.folder.mkdir(exist_ok=True)
        assert outcome.write({"verdict": verdict})
    assert published(tmp_path / "run") == {"verdict": "pass"}


def test_without_a_prepared_verdict_nothing_is_published(tmp_path: Path) -> None:
    with pytest.raises(Unpublished, match=f"the verdict of rank 0 is not in {tmp_path}: run.json was not written"):
        Outcome(tmp_path, "a").publish(0)
    assert list(tmp_path.iterdir()) == []


def test_what_was_removed_for_another_outcome_is_an_error_and_no_success(tmp_path: Path) -> None:
    one, other = Outcome(tmp_path / "run", "a"), Outcome(tmp_path / "run", "a")
    one.folder.mkdir()
    one.prepare({"verdict": "pass"}, 0)
    assert other.write({"verdict": "lost"})
    other.discard()
    with pytest.raises(Unpublished, match="has another verdict than that of rank 0"):
        one.publish(0)


def test_a_writer_that_ended_between_its_claim_and_run_json_is_finished_by_the_next(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path / "run", "a")
    outcome.folder.mkdir()
    outcome.prepare({"verdict": "pass"}, 0)
    outcome.page(0).write_text("the page")
    os.link(outcome.folder / ".ready.a.0.json", outcome.folder / ".run.a.json")
    Outcome(tmp_path / "run", "a").publish(0)
    assert published(outcome.folder) == {"verdict": "pass"}
    assert (outcome.folder / "report.html").read_text() == "the page"


def test_two_ranks_that_prepare_share_no_file(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path / "run", "a")
    outcome.folder.mkdir()
    for rank, verdict in ((0, "fail"), (1, "pass")):
        outcome.prepare({"verdict": verdict}, rank)
        outcome.page(rank).write_text(f"the page of rank {rank}")
    outcome.publish(1)
    assert published(outcome.folder) == {"verdict": "pass"}
    assert (outcome.folder / "report.html").read_text() == "the page of rank 1"


def test_a_file_system_without_links_keeps_the_first_outcome_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    folder = tmp_path / "run"
    folder.mkdir()
    assert Outcome(folder, "a").write({"verdict": "lost"})
    assert not Outcome(folder, "a").write({"verdict": "pass"})
    assert published(folder) == {"verdict": "lost"}
