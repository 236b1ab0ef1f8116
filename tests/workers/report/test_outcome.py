"""What became of a run is written once: the first word stays, whoever comes later, and however it was laid ready."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.report.outcome import Outcome


def told(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def test_the_first_outcome_stays(tmp_path: Path) -> None:
    one, other = Outcome(tmp_path / "run", "a"), Outcome(tmp_path / "run", "a")
    one.folder.mkdir()
    assert not one.claimed()
    assert one.write({"verdict": "lost"})
    assert other.claimed()
    assert not other.write({"verdict": "pass"})
    other.lay_ready({"verdict": "pass"})
    assert not other.publish()
    assert told(one.folder) == {"verdict": "lost"}


def test_what_was_laid_ready_is_put_in_place_by_any_rank_with_its_report(tmp_path: Path) -> None:
    one, other = Outcome(tmp_path / "run", "a"), Outcome(tmp_path / "run", "a")
    one.folder.mkdir()
    one.lay_ready({"verdict": "pass"})
    one.page.write_text("the page")
    assert not (one.folder / "run.json").exists() and not (one.folder / "report.html").exists()
    assert other.publish()
    assert not one.publish()
    assert told(one.folder) == {"verdict": "pass"}
    assert (one.folder / "report.html").read_text() == "the page"
    assert (tmp_path / "latest").resolve() == one.folder


def test_another_attempt_has_an_outcome_of_its_own(tmp_path: Path) -> None:
    for token, verdict in (("a", "lost"), ("b", "pass")):
        outcome = Outcome(tmp_path / "run", token)
        outcome.folder.mkdir(exist_ok=True)
        assert outcome.write({"verdict": verdict})
    assert told(tmp_path / "run") == {"verdict": "pass"}


def test_where_nothing_was_laid_ready_there_is_nothing_to_put_in_place(tmp_path: Path) -> None:
    assert not Outcome(tmp_path, "a").publish()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_links_keeps_the_first_word_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    folder = tmp_path / "run"
    folder.mkdir()
    assert Outcome(folder, "a").write({"verdict": "lost"})
    assert not Outcome(folder, "a").write({"verdict": "pass"})
    assert told(folder) == {"verdict": "lost"}
