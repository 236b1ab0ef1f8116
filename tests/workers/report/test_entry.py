"""What the gallery knows of a run, whole or broken."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from tests.workers.report.made_up import good_run, pipeline_run, with_check, without, written
from workers.report.entry import Entry, Verdict, entry
from workers.report.judge import judge, write_run
from workers.report.records import End, Ranks
from workers.report.stored import stored_run


def judged(folder: Path, records: Ranks) -> Path:
    """A run's folder with its verdict."""
    write_run(written(folder, records), judge(records))
    return folder


def seen(folder: Path) -> Entry:
    stored = stored_run(folder, time.time())
    assert stored is not None
    return entry(stored)


def aged(folder: Path) -> Path:
    """The folder, with nothing in it younger than an hour."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    return folder


def test_a_run_is_known_by_its_verdict_and_its_records(tmp_path: Path) -> None:
    found = seen(judged(tmp_path / "run", pipeline_run(4)))
    assert found.verdict == Verdict("pass", "13 checks held", "dp", 4, ("gpipe", "1f1b"))
    assert (found.title, found.began_at, found.duration_s) == ("gpt, 1.6M parameters", 100.0, 12.5)
    assert found.settings == ["RUN_MODE=dp", "WORLD_SIZE=4", "LAB_SEED=1"]
    assert found.thumbnail.told == "a step of each variant"
    assert found.faults == []


def test_a_run_that_failed_says_in_what(tmp_path: Path) -> None:
    found = seen(judged(tmp_path / "run", with_check(good_run(2), "weights", 1.0)))
    assert found.verdict.word == "fail"
    assert found.verdict.told.endswith("checks failed: naive weights, bucketed weights, ddp weights")


def test_a_run_without_a_verdict_is_known_by_its_records(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", without(End, good_run(2)))
    young = "no run.json: it ended before a verdict or runs elsewhere: it wrote within ten minutes"
    assert seen(folder).verdict == Verdict("unfinished", young, "dp", 2)
    found = seen(aged(folder))
    assert found.verdict == Verdict("unfinished", "no run.json: it ended before a verdict", "dp", 2)
    assert (found.duration_s, found.began_at) == (None, found.stored.written_at)


def test_a_run_whose_ranks_are_alive_is_running(tmp_path: Path) -> None:
    folder = judged(tmp_path / "run", good_run(2))
    with (folder / ".run").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert seen(folder).verdict[:2] == ("running", "its ranks are alive; the attempt before: pass, 16 checks held")
        (folder / "run.json").unlink()
        assert seen(folder).verdict == Verdict("running", "its ranks are alive", "dp", 2)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"verdict": "pass"}', b"\xff", b'{"run_mode": "dp", "world_size": "x", "variants": []}']
)
def test_a_broken_verdict_is_told(content: bytes, tmp_path: Path) -> None:
    folder = judged(tmp_path / "run", good_run(2))
    (folder / "run.json").write_bytes(content)
    found = seen(folder).verdict
    assert (found.word, found.mode, found.world_size) == ("broken", "dp", 2)
    assert found.told.startswith("run.json cannot be read: ")


def test_broken_records_are_told_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = judged(tmp_path / "run", good_run(2))
    with (folder / "rank1.jsonl").open("a") as lines:
        lines.write('{"record": "losses", "variant": "x"}\n')
    number = len((folder / "rank1.jsonl").read_text().splitlines())
    found = seen(folder)
    assert found.faults == [f"rank1.jsonl, line {number}, is a Losses with missing or unknown fields: values"]
    assert (found.verdict.word, found.title) == ("pass", "gpt, 1.6M parameters")


def test_numbers_that_are_none_of_the_labs_are_told(tmp_path: Path) -> None:
    folder = judged(tmp_path / "run", good_run(2))
    with (folder / "rank1.jsonl").open("a") as lines:
        lines.write('{"record": "timeline", "variant": "x", "step": 1, "spans": [["forward", "0", 0.0, NaN]]}\n')
    found = seen(folder)
    assert len(found.faults) == 1 and found.faults[0].startswith("its timeline or losses are none of the lab's")
    assert found.thumbnail.told == "no timeline and no losses"


def test_lines_that_no_card_needs_are_not_read(tmp_path: Path) -> None:
    folder = judged(tmp_path / "run", good_run(2))
    with (folder / "rank1.jsonl").open("a") as lines:
        lines.write('{"record": "wire"}\n')
    assert seen(folder).faults == []


def test_a_verdict_alone_is_a_run(tmp_path: Path) -> None:
    folder = judged(tmp_path / "run", good_run(2))
    for path in folder.glob("*.jsonl"):
        path.unlink()
    found = seen(folder)
    assert (found.verdict.word, found.title, found.settings, found.duration_s) == ("pass", "", [], None)
