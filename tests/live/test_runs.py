"""Which run is shown: the one that was named, else the newest, and the shown one until it is over."""

import time
from pathlib import Path

import pytest

from distlab.config import ConfigError
from distlab.live import server as shown_runs
from distlab.live.server import Runs
from distlab.report.verdict import judge, write_run
from tests.live.states import BEGAN_AT, recorded, run_of, state
from tests.report.made_up import good_run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is looked at each time."""
    monkeypatch.setattr(shown_runs, "LOOK_S", 0.0)


def test_the_newest_run_is_shown_until_it_is_over(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first", state(0))
    (tmp_path / "latest").symlink_to("first")
    runs = Runs(tmp_path)
    assert runs.snapshot().run_id == "first"
    time.sleep(0.02)
    run_of(tmp_path / "second", state(0))
    assert runs.snapshot().run_id == "first"  # which goes on
    write_run(first, judge(good_run(3)))
    assert runs.snapshot().verdict == "pass"
    assert runs.snapshot().run_id == "second"


def test_a_new_one_is_waited_for(tmp_path: Path) -> None:
    run_of(tmp_path / "before", state(0))
    runs = Runs(tmp_path, new=True)
    assert (runs.snapshot().run_id, runs.snapshot().verdict) == ("", "waiting")
    run_of(tmp_path / "now", state(0, began_at=time.time()))
    assert runs.snapshot().run_id == "now"


def test_a_folder_that_the_first_run_makes_is_waited_for(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs", new=True)
    assert runs.snapshot().verdict == "waiting"
    run_of(tmp_path / "runs" / "first", state(0, began_at=time.time()))
    assert runs.snapshot().run_id == "first"


def test_a_run_that_is_named_stays(tmp_path: Path) -> None:
    run_of(tmp_path / "named", state(0))
    runs = Runs(tmp_path / "named")
    write_run(tmp_path / "named", judge(good_run(3)))
    run_of(tmp_path / "newer", state(0, began_at=BEGAN_AT + 9))
    assert [runs.snapshot().run_id for _ in range(2)] == ["named", "named"]


def test_what_shows_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder: name that of a run, such as runs/latest"):
        Runs(tmp_path / "absent")
    recorded(run_of(tmp_path / "unshown"), 0)
    with pytest.raises(ConfigError, match="shows nothing: its ranks ran without LAB_LIVE=1"):
        Runs(tmp_path / "unshown")
