"""The records of a rank while it writes them: no line twice, none by half, and another attempt anew."""

from pathlib import Path

import pytest

from distlab.live.state import Tail
from distlab.report.reading import to_line
from distlab.report.records import Failed, Lost, Said

pytestmark = pytest.mark.timeout(60)

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
