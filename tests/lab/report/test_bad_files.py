"""Whatever lies in a run's folder: each command that reads it ends, names it in a line, and goes on with the others."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distlab.cli.report import main as report
from distlab.lab.report.run_folder import point_latest
from distlab.lab.report.verdict import judge, write_run
from tests.lab.report.made_up import good_run, written

DEEP = "[" * 100_000
FILES = {"records": "rank1.jsonl", "verdict": "run.json", "claim": ".run"}


def put(path: Path, content: str) -> None:
    path.write_text(content, errors="surrogatepass")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def fields_missing(path: Path) -> None:
    """Of the first object in the file all but the first."""
    lines = path.read_text().splitlines()
    name, value = next(iter(json.loads(lines[0] if path.suffix == ".jsonl" else "".join(lines)).items()))
    put(path, json.dumps({name: value}) + "\n")


def changed(path: Path, **values: Any) -> None:
    """The first object in the file with other values."""
    lines = path.read_text().splitlines()
    first = lines[:1] if path.suffix == ".jsonl" else lines
    found = {name: values.get(name, value) for name, value in json.loads("".join(first)).items()}
    put(path, "\n".join([json.dumps(found), *lines[len(first) :]]) + "\n")


MAKE: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path.name),
    "a huge file": huge,
    "deep JSON": lambda path: put(path, DEEP),
    "deep in a record": lambda path: put(path, '{"record": "table", "title": "x", "columns": [], "rows": ' + DEEP),
    "no text": lambda path: path.write_bytes(bytes(range(256))),
    "a lone surrogate": lambda path: put(path, '{"record": "said", "heading": "\\ud800", "text": "\ud800"}\n'),
    "nothing": lambda path: put(path, ""),
}
ALTER: dict[str, Callable[[Path], Any]] = {
    "missing fields": fields_missing,
    "a world without end": lambda path: changed(path, world_size=10**12, rank=0),
    "a number that no float is": lambda path: changed(path, world_size=10**400, began_at=10**400),
    "a verdict of another type": lambda path: changed(path, verdict=["pass"], lost=[1], config=1, host=1),
    "half a pair": lambda path: changed(path, host="\ud800", run_mode="\ud800", run_id="\ud800"),
}
KINDS = {**MAKE, **ALTER}


def run_in(runs: Path, name: str) -> Path:
    """A run with records, a verdict and a claim."""
    folder = written(runs / name, good_run(3))
    write_run(folder, judge(good_run(3)))
    (folder / ".run").write_text("token")
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs, `good` and `bad`, which LAB_RUNS_DIR names."""
    folder = tmp_path / "runs"
    for name in ("good", "bad"):
        run_in(folder, name)
    monkeypatch.setenv("LAB_RUNS_DIR", str(folder))
    return folder


def spoil(path: Path, kind: str) -> None:
    if kind in MAKE:
        path.unlink()
    KINDS[kind](path)


CASES = [(file, kind) for file in FILES for kind in KINDS if kind in MAKE or file != "claim"]  # a claim has no fields


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("file", "kind"), CASES)
def test_every_reader_ends_and_shows_the_other_run(
    runs: Path, file: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    path = runs / "bad" / FILES[file]
    spoil(path, kind)

    assert report(["--clean", "1"]) == 0
    assert "that may be removed is older than 1 days" in capsys.readouterr().out

    if file == "records":  # of which alone a report is made
        codes = [report([str(runs / "bad")]), report([str(runs / "good"), str(runs / "bad")])]
        errors = capsys.readouterr().err
        if kind not in ("nothing", "half a pair"):
            assert codes == [2, 2] and errors.count("rank1.jsonl") == errors.count("refused    ") == 2
    assert time.monotonic() - began < 25


@pytest.mark.parametrize("kind", ["a pipe", "an endless device", "a folder", "a loop"])
def test_clean_removes_a_run_with_whatever_is_in_it(runs: Path, kind: str) -> None:
    for file in FILES.values():
        spoil(runs / "bad" / file, kind)
    (runs / "latest").symlink_to("latest")  # which leads to itself
    for path in [*(runs / "bad").iterdir(), *(runs / "good").iterdir()]:
        if not path.is_symlink():
            os.utime(path, (1e9, 1e9))
    run_in(runs, "next")  # the newest run stays
    assert report(["--clean", "1", "--yes"]) == 0
    assert not (runs / "good").exists()
    point_latest(runs / "next")
    assert (runs / "latest").resolve() == runs / "next"


def test_one_that_cannot_be_removed_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(folder: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(folder))

    run_in(runs, "next")
    monkeypatch.setattr("shutil.rmtree", refuses)
    for path in (runs / "bad").iterdir():
        os.utime(path, (1e9, 1e9))
    assert report(["--clean", "1", "--yes"]) == 2
    assert capsys.readouterr().err == f"refused    old runs cannot be removed: Operation not permitted: {runs}/bad\n"


def test_a_folder_whose_name_is_no_text_is_listed(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in (runs / "good").iterdir():
        os.utime(path, (1e9, 1e9))
    (runs / "good").rename(os.fsdecode(bytes(runs) + b"/\xff\n"))
    assert report(["--clean", "1", "--yes"]) == 0
    assert "\\udcff\\n" in capfd.readouterr().out


def test_records_that_fit_their_schema_and_not_each_other_are_refused(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (runs / "bad" / "rank0.jsonl").open("a") as records:
        records.write('{"record": "unshared", "hosts": []}\n')
    (runs / "bad" / "rank2.jsonl").unlink()
    assert report([str(runs / "bad")]) == 2
    assert "bad: its records do not fit each other (IndexError" in capsys.readouterr().err
