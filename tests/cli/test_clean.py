"""Old runs: which are listed, which an option names, and that nothing else is touched."""

import fcntl
import io
import os
from pathlib import Path

import pytest

from distlab.cli.clean import age, chosen, human_age, main, remove, stored_run, stored_runs
from tests.report.made_up import good_run, written

HOUR = 3600
NOW = 1_000_000_000.0


def made(runs: Path, name: str, hours: float, *, verdict: bool = True, now: float = NOW) -> Path:
    """A run that wrote its last record `hours` ago."""
    folder = runs / name
    folder.mkdir(parents=True)
    for file in ["rank0.jsonl", "rank1.jsonl", *["run.json"] * verdict]:
        (folder / file).write_text("x" * 100)
        os.utime(folder / file, (now - hours * HOUR, now - hours * HOUR))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs of 1, 30 and 300 hours ago, the middle one the latest, and what is none."""
    folder = tmp_path / "runs"
    for name, hours in (("young", 1), ("middle", 30), ("old", 300)):
        made(folder, name, hours)
    (folder / "latest").symlink_to("middle")
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("kept")
    made(tmp_path, "elsewhere", 500)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    return folder


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({"keep": 2}, ["old"]),
        ({"keep": 0}, ["young", "old"]),
        ({"older_than_s": 24 * HOUR}, ["old"]),
        ({"older_than_s": 0.5 * HOUR}, ["young", "old"]),
        ({"everything": True}, ["young", "middle", "old"]),
    ],
)
def test_latest_goes_with_all_runs_alone(runs: Path, options: dict[str, float], gone: list[str]) -> None:
    asked = {"keep": None, "older_than_s": None, "everything": False} | options
    assert [old.folder.name for old in chosen(stored_runs(runs, NOW)[0], NOW, **asked)] == gone  # type: ignore[arg-type]


def test_a_run_that_may_be_going_on_is_kept(runs: Path) -> None:
    made(runs, "running", 0.1, verdict=False)
    made(runs, "killed", 1, verdict=False)
    resumed = made(runs, "resumed", 0.1)
    os.utime(resumed / "run.json", (NOW - 9 * HOUR, NOW - 9 * HOUR))  # the verdict of an earlier attempt
    gone = chosen(stored_runs(runs, NOW)[0], NOW, keep=None, older_than_s=None, everything=True)
    assert {old.folder.name for old in gone} == {"young", "middle", "old", "killed"}


def said(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    monkeypatch.setenv("LAB_RUNS_DIR", str(runs))
    assert main(words) == 0
    return capsys.readouterr().out.splitlines()


def test_without_an_option_nothing_goes(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(runs.rglob("*"))
    lines = said(runs, monkeypatch, capsys)
    assert [line.split()[0] for line in lines[1:4]] == ["young", "middle", "old"]
    assert lines[4] == f"3 runs in {runs}/, 900 B"
    assert lines[5].startswith("to remove  --keep 5")
    assert sorted(runs.rglob("*")) == before


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def left(runs: Path) -> list[str]:
    return sorted(stored.folder.name for stored in stored_runs(runs, NOW)[0])


@pytest.mark.parametrize(
    ("answer", "gone"), [("y\n", True), ("Yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_it_asks_before_it_removes(
    answer: str, gone: bool, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    lines = said(runs, monkeypatch, capsys, "--keep", "1")
    assert [line.split()[0] for line in lines[:2]] == ["run", "old"]
    assert lines[2].startswith("remove 1 run, 300 B? [y/N]")
    assert lines[-1].endswith("1 run removed from " + f"{runs}/, 2 left, 300 B" if gone else "nothing is removed")
    assert left(runs) == (["middle", "young"] if gone else ["middle", "old", "young"])


def test_without_a_terminal_nobody_is_asked_and_nothing_removed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAB_RUNS_DIR", str(runs))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["--all"]) == 2
    said = capsys.readouterr()
    assert said.err == "refused    there is no terminal to ask in: --yes removes 3 runs, 900 B, without asking\n"
    assert (said.out, left(runs)) == ("", ["middle", "old", "young"])


def test_where_no_run_is_named_nobody_is_asked(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(runs, monkeypatch, capsys, "--keep", "5") == [f"0 runs removed from {runs}/, 3 left, 0 B"]


def test_a_run_that_goes_on_while_the_question_stands_is_kept(runs: Path) -> None:
    named = [stored for stored in stored_runs(runs, NOW)[0] if stored.folder.name != "middle"]
    with (runs / "old" / ".run").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert remove(runs, named) == 0
    assert left(runs) == ["middle", "old"]


def test_what_is_removed_is_said_and_nothing_else_is_touched(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(runs, monkeypatch, capsys, "--all", "--yes")
    assert lines[-1] == f"3 runs removed from {runs}/, 0 left, 900 B"
    assert sorted(path.name for path in runs.iterdir()) == ["linked", "notes"]
    assert (runs / "notes" / "mine.txt").read_text() == "kept"
    assert (runs.parent / "elsewhere" / "run.json").exists()


def test_latest_names_the_newest_run_that_is_left(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "latest").unlink()
    (runs / "latest").symlink_to("somebody-removed-it")
    said(runs, monkeypatch, capsys, "--keep", "1", "--yes")
    assert (runs / "latest").readlink() == Path("young")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--older-than", "7"], "'7' is not an age such as 7d, 12h or 30m"),
        (["--keep", "-1"], "'-1' is not a number of runs such as 5"),
        (["--keep", "1", "--all"], "not allowed with argument --keep"),
    ],
)
def test_what_names_no_run_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert sentence in capsys.readouterr().err


def test_settings_that_are_wrong_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAB_STEP", "5")
    assert main(["--all"]) == 2
    assert "LAB_STEP is not a variable of the lab" in capsys.readouterr().out


def test_ages() -> None:
    assert (age("7d"), age("1.5h"), age("30m")) == (7 * 86400, 5400, 1800)
    assert [human_age(seconds) for seconds in (-5, 90, 3 * HOUR, 50 * HOUR)] == [
        "0 min ago",
        "1 min ago",
        "3 h ago",
        "2 d ago",
    ]


# What is a run in a folder of runs, and what is known of it without its records.


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
    found, _ = stored_runs(tmp_path, NOW)
    assert [(stored.folder.name, stored.written_at) for stored in found] == [
        ("claimed", NOW - 10), ("judged", NOW - 20), ("recorded", NOW - 30)
    ]  # fmt: skip
    assert [stored.latest for stored in found] == [False, True, False]
    assert found[1].nbytes == 100
    assert stored_runs(tmp_path / "absent", NOW) == ([], [])


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


def test_where_no_run_is_the_way_to_one_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("LAB_RUNS_DIR", str(tmp_path / "runs"))
    for words in ([], ["--all"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"no run     in {tmp_path}/runs/: make one with ./run or `distlab run`\n"
