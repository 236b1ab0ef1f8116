"""One run a folder: the second is refused, and the next attempt waits for the end of the one before."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distlab.report import run_folder as claims
from distlab.report.run_folder import FolderInUse, claim, is_held


def test_all_ranks_of_a_run_hold_its_folder(tmp_path: Path) -> None:
    held = [claim(tmp_path / "run", "token", goes_on=False) for _ in range(3)]
    assert is_held(tmp_path / "run")
    for file in held:
        os.close(file)
    assert not is_held(tmp_path / "run")


def test_of_two_runs_that_begin_at_once_one_has_the_folder(tmp_path: Path) -> None:
    """Four ranks each, all at the same moment."""

    def begin(token: str) -> str:
        try:
            claim(tmp_path / "run", token, goes_on=False)
        except FolderInUse:
            return "refused"
        return token

    for number in range(5):
        tokens = [f"{number}a", f"{number}b"] * 4
        (tmp_path / "run" / claims.FILE).unlink(missing_ok=True)
        with ThreadPoolExecutor(8) as ranks:
            ended = list(zip(tokens, ranks.map(begin, tokens), strict=True))
        winner = (tmp_path / "run" / claims.FILE).read_text()
        assert all(result == (token if token == winner else "refused") for token, result in ended)


def test_a_run_that_goes_on_takes_over_what_nobody_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "GONE_S", 0.3)
    before = claim(tmp_path / "run", "first", goes_on=False)
    with pytest.raises(FolderInUse):
        claim(tmp_path / "run", "second", goes_on=True)
    os.close(before)
    for _ in range(2):
        claim(tmp_path / "run", "second", goes_on=True)
    with pytest.raises(FolderInUse):
        claim(tmp_path / "run", "third", goes_on=False)
