"""What is left of a run: the newest is `latest`, and a broken one has the words of all who survived."""

from pathlib import Path

from workers.cluster.verdict import Verdict
from workers.ending import bury, last_words, point_latest
from workers.journal import Journal
from workers.report.judge import judge
from workers.report.records import Failed, Lost, Start, select


def test_latest_is_the_newest_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        point_latest(tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name


def broken_rank(folder: Path, rank: int) -> Journal:
    journal = Journal()
    journal.open(folder, rank)
    journal.write(Start(rank, "run", "dp", 3, "host", {}, {}, {}))
    return journal


def test_the_lowest_survivor_writes_what_all_survivors_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    verdict = Verdict(3, "rank 0 lost at step 5", (Lost(0, 5, "no heartbeat for 2.5 s"),))
    journals = {rank: broken_rank(folder, rank) for rank in (0, 1, 2)}
    bury(verdict, [1, 2], journals[2], 2)
    assert not (folder / "run.json").exists(), "rank 2 is not the lowest"
    bury(verdict, [1, 2], journals[1], 1)
    assert (folder / "run.json").exists() and (folder / "report.html").exists()
    words = last_words(folder, [1, 2])
    assert {rank for rank, _ in select(words, Failed)} == {1, 2}
    run = judge(words)
    assert run["verdict"] == "lost"
    assert [(lost["rank"], lost["step"]) for lost in run["lost"]] == [(0, 5)]


def test_a_survivor_without_words_is_not_waited_for_without_end(tmp_path: Path) -> None:
    broken_rank(tmp_path / "run", 1)
    assert set(last_words(tmp_path / "run", [1])) == {1}
