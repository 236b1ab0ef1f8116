"""The link to the newest run, whatever stands beside it."""

import os
import time
from pathlib import Path

from distlab.report.run_folder import STALE_S, point_latest


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
