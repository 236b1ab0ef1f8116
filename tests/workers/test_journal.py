"""Words and records of a rank: nothing before a run is accepted, everything after."""

from pathlib import Path

import pytest

from workers.journal import Journal
from workers.report.records import End, Said, read


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
    for record in (Said("predict", "2(N-1)/N · S"), End(0, 1.5)):
        journal.write(record)
    assert read(tmp_path / "rank0.jsonl") == journal.records == [Said("predict", "2(N-1)/N · S"), End(0, 1.5)]
