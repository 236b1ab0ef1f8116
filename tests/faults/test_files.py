"""A disk that is full, told as the kernel tells it; and a checkpoint with one bit changed."""

import random
from pathlib import Path

import pytest

from distlab.faults import injectors
from distlab.report.records import Said
from distlab.report.run_folder import Journal, Unwritable

pytestmark = pytest.mark.timeout(60)


def test_a_journal_meets_the_full_disk_in_its_own_sentence(tmp_path: Path) -> None:
    journal = Journal()
    assert journal.open_files == []
    journal.open(tmp_path, 0)
    journal.write(Said("a", "before"))
    injectors.fill(journal.open_files)
    with pytest.raises(Unwritable, match=r"cannot be written any more \(No space left on device\)"):
        journal.say("after")
    with pytest.raises(Unwritable):
        journal.write(Said("a", "after"))
    assert "before" in (tmp_path / "rank0.jsonl").read_text()
    assert "after" not in (tmp_path / "rank0.jsonl").read_text()


def test_one_bit_of_one_file_changes(tmp_path: Path) -> None:
    before = {name: bytes(range(100)) for name in ("a", "b", "manifest.json")}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    damaged = injectors.damage(tmp_path, ["a", "b"], random.Random(5))
    assert damaged in ("a", "b")
    for name, content in before.items():
        now = (tmp_path / name).read_bytes()
        bits = sum((one ^ other).bit_count() for one, other in zip(content, now, strict=True))
        assert bits == (1 if name == damaged else 0)
