"""Words and records of a rank: nothing before a run is accepted, everything after."""

import os
from pathlib import Path

import pytest

from distlab.report.reading import read_records, read_run
from distlab.report.records import End, Said
from distlab.report.run_folder import Journal, Unwritable, put_aside, ranks_beyond


def test_a_refused_run_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal().say("waiting for rank 2")
    assert capsys.readouterr().out == "waiting for rank 2\n"
    assert list(tmp_path.iterdir()) == []


def test_what_was_said_before_the_run_stands_in_its_log(tmp_path: Path) -> None:
    journal = Journal()
    journal.say("early")
    journal.open(tmp_path / "run", rank=1)
    journal.say("late")
    assert (tmp_path / "run" / "rank1.log").read_text() == "early\nlate\n"


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
    said = (tmp_path / "rank0.log").read_text().splitlines()
    assert said[::2] == [f"words of attempt {attempt}" for attempt in (1, 2, 3)]
    assert said[1::2] == [f"again      attempt {attempt} of this run" for attempt in (2, 3)]
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
