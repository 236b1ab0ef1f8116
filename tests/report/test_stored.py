"""What is a run in a folder of runs, and what is known of it without its records."""

import fcntl
import os
from pathlib import Path

from distlab.report.run_folder import stored_run, stored_runs
from tests.report.made_up import good_run, written

NOW = 1_000_000_000.0


def dated(folder: Path, ago_s: float) -> Path:
    """The folder, with all of its files last written so long before NOW."""
    for path in folder.iterdir():
        os.utime(path, (NOW - ago_s, NOW - ago_s))
    return folder


def test_a_run_has_records_a_verdict_or_a_claim(tmp_path: Path) -> None:
    dated(written(tmp_path / "recorded", good_run(2)), 30)
    for name, file, ago_s in (("judged", "run.json", 20), ("claimed", ".run", 10), ("none", "mine.txt", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("x" * 100)
        dated(tmp_path / name, ago_s)
    (tmp_path / "latest").symlink_to("judged")
    (tmp_path / "index.html").touch()
    found = stored_runs(tmp_path, NOW)
    assert [(stored.folder.name, stored.written_at) for stored in found] == [
        ("claimed", NOW - 10), ("judged", NOW - 20), ("recorded", NOW - 30)
    ]  # fmt: skip
    assert [stored.latest for stored in found] == [False, True, False]
    assert found[1].nbytes == 100
    assert stored_runs(tmp_path / "absent", NOW) == []


def test_a_run_is_going_on_while_it_is_held_or_writes(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", good_run(2))
    (folder / ".run").touch()

    def running(ago_s: float) -> bool:
        stored = stored_run(dated(folder, ago_s), NOW)
        assert stored is not None
        return stored.running

    assert running(599)
    assert not running(601)
    with (folder / ".run").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert running(601)
    (folder / "run.json").touch()
    assert not running(1)


def test_checkpoints_are_counted_and_belong_to_its_bytes(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", good_run(1))
    before = stored_run(dated(folder, 9999), NOW)
    (folder / "checkpoints" / "step-00000020").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000020" / "weights").write_bytes(bytes(1000))
    after = stored_run(folder, NOW)
    assert before is not None and after is not None
    assert (after.nbytes - before.nbytes, after.note) == (1000, "1 checkpoints")
