"""What became of a run is written once: the first word stays, whoever comes later, and however it was laid ready."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from distlab.report.run_result import Outcome, Unpublished


def told(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def test_the_first_outcome_stays(tmp_path: Path) -> None:
    one, other = Outcome(tmp_path / "run", "a"), Outcome(tmp_path / "run", "a")
    one.folder.mkdir()
    assert not one.claimed()
    assert one.write({"verdict": "lost"})
    assert other.claimed()
    assert not other.write({"verdict": "pass"})
    other.lay_ready({"verdict": "pass"}, 0)
    with pytest.raises(Unpublished, match=r"another verdict than that of rank 0 stands in .*run.json"):
        other.publish(0)
    assert told(one.folder) == {"verdict": "lost"}


def test_what_was_laid_ready_is_put_in_place_by_any_rank_with_its_report(tmp_path: Path) -> None:
    one, other = Outcome(tmp_path / "run", "a"), Outcome(tmp_path / "run", "a")
    one.folder.mkdir()
    one.lay_ready({"verdict": "pass"}, 0)
    one.page(0).write_text("the page")
    assert not (one.folder / "run.json").exists() and not (one.folder / "report.html").exists()
    other.publish(0)
    one.publish(0)
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
    with pytest.raises(Unpublished, match=f"the verdict of rank 0 is not in {tmp_path}: run.json was not written"):
        Outcome(tmp_path, "a").publish(0)
    assert list(tmp_path.iterdir()) == []


def test_what_was_removed_for_another_outcome_is_an_error_and_no_success(tmp_path: Path) -> None:
    one, other = Outcome(tmp_path / "run", "a"), Outcome(tmp_path / "run", "a")
    one.folder.mkdir()
    one.lay_ready({"verdict": "pass"}, 0)
    assert other.write({"verdict": "lost"})
    other.discard()
    with pytest.raises(Unpublished, match="another verdict than that of rank 0 stands in"):
        one.publish(0)


def test_a_writer_that_ended_between_its_claim_and_run_json_is_finished_by_the_next(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path / "run", "a")
    outcome.folder.mkdir()
    outcome.lay_ready({"verdict": "pass"}, 0)
    outcome.page(0).write_text("the page")
    os.link(outcome.folder / ".ready.a.0.json", outcome.folder / ".run.a.json")
    Outcome(tmp_path / "run", "a").publish(0)
    assert told(outcome.folder) == {"verdict": "pass"}
    assert (outcome.folder / "report.html").read_text() == "the page"


def test_two_ranks_that_lay_ready_share_no_file(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path / "run", "a")
    outcome.folder.mkdir()
    for rank, verdict in ((0, "fail"), (1, "pass")):
        outcome.lay_ready({"verdict": verdict}, rank)
        outcome.page(rank).write_text(f"the page of rank {rank}")
    outcome.publish(1)
    assert told(outcome.folder) == {"verdict": "pass"}
    assert (outcome.folder / "report.html").read_text() == "the page of rank 1"


def test_a_file_system_without_links_keeps_the_first_word_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    folder = tmp_path / "run"
    folder.mkdir()
    assert Outcome(folder, "a").write({"verdict": "lost"})
    assert not Outcome(folder, "a").write({"verdict": "pass"})
    assert told(folder) == {"verdict": "lost"}
