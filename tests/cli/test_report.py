"""`distlab report` rebuilds a run from its records, with the same verdict, and names file and line of a broken record."""

import errno
import fcntl
import io
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from distlab.cli.report import DAY_S, main
from distlab.lab.report.records import End, Failed, Lost, Ranks, Start
from distlab.lab.report.standard_streams import of_a_stream
from distlab.lab.report.verdict import judge, write_run
from tests.lab.report.made_up import bent, good_run, plus, with_check, with_measured, without, written

FAILING = {
    "a check": (with_check(good_run(), "weights", 1.0), 1),
    "bytes": (with_measured(good_run(), "naive", "wire bytes", 1e6, 0), 1),
    "a rank cut short": (without(End, good_run(), 1), 3),
    "a lost rank": (plus(without(End, good_run(), 2), Lost(2, 9, "killed")), 3),
    "an error": (plus(without(End, good_run(), 0), Failed(1, "ValueError: no")), 1),
    "a refusal": (plus(without(End, good_run(), 0), Failed(2, "run id exists")), 2),
    "a stop": (plus(without(End, good_run(), 0), Failed(143, "stopped by SIGTERM")), 143),
}


def test_a_run_is_rebuilt_from_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", good_run())
    write_run(run, judge(good_run()))
    before = (run / "run.json").read_bytes()
    (run / "run.json").unlink()
    assert main([str(run)]) == 0
    assert (run / "run.json").read_bytes() == before
    assert (run / "report.html").exists()
    expected = capsys.readouterr().out.splitlines()
    assert expected[-3:-1] == ["PASS       16 checks passed", f"report     {run / 'report.html'}"]


def test_records_of_more_than_ten_ranks_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", good_run(12))
    (run / "rank3.1.jsonl").write_text("of an attempt before\n")
    assert main([str(run)]) == 0, capsys.readouterr().out
    assert json.loads((run / "run.json").read_text())["lost"] == []


@pytest.mark.parametrize("kind", FAILING)
def test_every_kind_of_failure_has_its_exit_code(kind: str, tmp_path: Path) -> None:
    records, code = FAILING[kind]
    junit = tmp_path / "junit.xml"
    assert main([str(written(tmp_path / "run", records)), "--junit", str(junit)]) == code
    suite = ET.parse(junit).getroot()[0]
    assert int(suite.get("failures", 0)) + int(suite.get("errors", 0)) > 0


def test_junit_has_a_case_for_each_check_and_comparison(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    main([str(written(tmp_path / "run", with_check(good_run(), "weights", 1.0))), "--junit", str(junit)])
    suite = ET.parse(junit).getroot()[0]
    cases = {(case.get("classname"), case.get("name")): case for case in suite}
    assert suite.get("tests") == str(len(suite)) == "26"  # ten checks, fifteen comparisons, one skipped variant
    failure = cases["distlab.dp.naive", "weights"].find("failure")
    assert (
        failure is not None and failure.get("message") == "naive weights: differs by 1.0e+00, but only 1e-12 is allowed"
    )
    assert cases["distlab.dp.naive", "gradients"].find("failure") is None
    assert cases["distlab.dp.ddp", "wire bytes"].find("skipped") is not None
    assert (suite.get("failures"), suite.get("skipped")) == ("3", "10")


def test_junit_escapes_characters_that_xml_forbids(tmp_path: Path) -> None:
    records = plus(without(End, good_run(), 2), Lost(2, 9, "\x1b[31mkilled\x00 & <gone>"))
    main([str(written(tmp_path / "run", records)), "--junit", str(tmp_path / "junit.xml")])
    error = ET.parse(tmp_path / "junit.xml").getroot().find(".//error")
    assert error is not None and error.get("message") == "rank 2 lost at step 9: ?[31mkilled? & <gone>"


@pytest.mark.parametrize(
    ("line", "expected"),
    [('{"record": "end", "rank": 1, "dur', "is not a record"), ('{"record": "nonsense"}', "is not a record"),
     ('{"record": "end", "rank": 1}', "missing required field `started_at`"), ("[]", "is not a record"),
     ('{"record": "end", "rank": 1, "started_at": "long", "first_step_at": null, "ended_at": 1, "watch_cpu_s": 0}', "got `str` - at `$.started_at`"),
     ("\udcff", "is not a record")],
    ids=["truncated", "unknown", "field", "list", "type", "binary"],
)  # fmt: skip
def test_a_broken_line_is_refused_by_file_and_line(
    line: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "run", good_run())
    number = len((run / "rank1.jsonl").read_text().splitlines()) + 1
    with (run / "rank1.jsonl").open("a", errors="surrogateescape") as records:
        records.write(line)
    assert main([str(run)]) == 2
    output = capsys.readouterr().err
    assert f"rank1.jsonl, line {number}" in output and expected in output
    assert not (run / "run.json").exists() and not (run / "report.html").exists()


@pytest.mark.parametrize("content", [None, {}], ids=["absent", "empty"])
def test_a_folder_without_a_run_is_refused(
    content: Ranks | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    if content is not None:
        written(folder, content)
    assert main([str(folder)]) == 2
    assert f"{folder}" in capsys.readouterr().err


def test_a_junit_file_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(written(tmp_path / "run", good_run())), "--junit", str(tmp_path / "absent" / "j.xml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path / "run", good_run())
    with monkeypatch.context() as patched:
        patched.setattr(sys.stdout, "write", full_disk)
        with pytest.raises(OSError, match="No space left") as error:
            main([str(run)])
        assert of_a_stream(error.value)
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    assert main([str(run)]) == 1
    assert f"broken     {run}/report.html cannot be written: No space left on device" in capsys.readouterr().err


def test_page_only_writes_no_verdict(tmp_path: Path) -> None:
    run = written(tmp_path / "run", FAILING["a check"][0])
    assert main(["--page-only", str(run)]) == 0
    assert (run / "report.html").exists() and not (run / "run.json").exists()


def test_two_runs_are_compared_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = written(tmp_path / "old", good_run()), written(tmp_path / "new", FAILING["a check"][0])
    assert main([str(old), str(new)]) == 0
    first, *expected = capsys.readouterr().out.splitlines()
    assert first.split() == ["compare", "old", "new", "ratio"]  # both have one run id: then the folders name them
    assert expected[0].split() == ["verdict", "PASS", "FAIL"]
    assert sum(line.split() == ["naive", "weights", "passed", "FAILED"] for line in expected) == 1
    assert not [*tmp_path.glob("*/*.html"), *tmp_path.glob("*/run.json")]


def test_an_unreadable_run_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, broken = written(tmp_path / "good", good_run(2)), written(tmp_path / "broken", good_run(2))
    (broken / "rank1.jsonl").write_text("[]\n")
    assert main([str(good), str(broken)]) == 2
    assert f"refused    {broken}/rank1.jsonl, line 1, is not a record" in capsys.readouterr().err
    assert list(tmp_path.glob("*/*.html")) == []


@pytest.mark.parametrize(
    "arguments", [[], ["a", "b", "c"], ["a", "b", "--page-only"], ["a", "b", "--junit", "x"], ["a", "--frob"]]
)
def test_a_wrong_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: distlab report" in capsys.readouterr().err


def test_it_runs_as_a_module_without_torch(tmp_path: Path) -> None:
    run = written(tmp_path / "run", good_run(2))
    program = (
        f"import sys; from distlab.cli.report import main; code = main([{str(run)!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_run_the_command_for_one_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "latest")]) == 2
    expected = f"refused    {tmp_path}/latest is not the folder of a run: there is none yet, make one with ./run or `distlab run`"
    assert capsys.readouterr().err == f"{expected}\n"


def test_a_report_shows_the_planners_numbers_or_the_reason(tmp_path: Path) -> None:
    run = written(tmp_path / "run", good_run(2))
    assert main([str(run), "--page-only"]) == 0
    assert "not planned: only the lab" in (run / "report.html").read_text()
    alien = bent(good_run(2), lambda each: replace(each, run_mode="moe") if isinstance(each, Start) else each)
    assert main([str(written(tmp_path / "alien", alien)), "--page-only"]) == 0
    assert "What the planner predicts" not in (tmp_path / "alien" / "report.html").read_text()


# Old runs: which are listed, who is asked, and that nothing else is touched.


class Terminal(io.StringIO):
    """Input that a person types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make runs that ended so many days ago, a link to a run elsewhere, and folders without a run."""
    folder = tmp_path / "runs"
    ages = {"runs/newest": 8, "runs/latest_of": 9, "runs/held": 10, "runs/old": 11, "elsewhere": 20}
    for name, age in ages.items():
        run = tmp_path / name
        run.mkdir(parents=True)
        for file in ("rank0.jsonl", "run.json", ".run"):
            (run / file).touch()
            os.utime(run / file, (time.time() - age * DAY_S,) * 2)
    (folder / "latest").symlink_to("latest_of")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").touch()
    (folder / "old" / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("LAB_RUNS_DIR", str(folder))
    return folder


@pytest.fixture
def held(runs: Path) -> Iterator[None]:
    """A rank of a run is still alive."""
    with (runs / "held" / ".run").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    ("words", "answer", "code", "expected"),
    [
        (["7"], Terminal("y\n"), 0, "remove 1 run? [y/N] removed    {runs}/old"),
        (["7"], Terminal("Yes\n"), 0, "remove 1 run? [y/N] removed    {runs}/old"),
        (["7", "--yes"], io.StringIO(), 0, "removed    {runs}/old"),
        (["7"], Terminal("\n"), 0, "nothing is removed"),
        (["7"], Terminal(""), 0, "nothing is removed"),
        (["7"], io.StringIO("y\n"), 2, "refused    there is no terminal to ask in: --yes removes them without asking"),
        (["12", "--yes"], io.StringIO(), 0, "clean      no run in {runs}/ that may be removed is older than 12 days"),
    ],
)
def test_only_old_runs_are_removed_after_asking(
    words: list[str], answer: io.StringIO, code: int, expected: str, runs: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", answer)
    before = {path for path in runs.parent.rglob("*") if "old" not in path.parts}
    assert main(["--clean", *words]) == code
    output = "".join(capsys.readouterr())
    assert expected.format(runs=runs) in output
    assert (f"old        {runs}/old\n" in output) == (words[0] == "7")
    assert (runs / "old").exists() == ("removed  " not in expected)
    assert {path for path in runs.parent.rglob("*") if "old" not in path.parts} == before


def test_a_run_that_continues_during_the_question_is_kept(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (runs / "old" / ".run").open() as file:

        def agree(_: str) -> bool:
            fcntl.flock(file, fcntl.LOCK_SH)
            return True

        monkeypatch.setattr("distlab.cli.report.agreed", agree)
        monkeypatch.setattr("sys.stdin", Terminal())
        assert main(["--clean", "7"]) == 0
    assert (runs / "old").exists() and not (runs / "held").exists()


@pytest.mark.usefixtures("held")
def test_a_run_that_cannot_be_removed_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / "rank0.jsonl"))

    monkeypatch.setattr("distlab.cli.report.shutil.rmtree", full)
    assert main(["--clean", "7", "--yes"]) == 2
    assert (
        capsys.readouterr().err == f"refused    old runs cannot be removed: Permission denied: {runs}/old/rank0.jsonl\n"
    )
    monkeypatch.setenv("LAB_STEP", "5")
    assert main(["--clean", "7"]) == 2
    assert "LAB_STEP is not a variable of the lab" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--clean", "0"], "'0' is not a number of days such as 7, 1 at least"),
        (["--clean", "7d"], "'7d' is not a number of days"),
        (["--clean", "7", "runs/latest"], "name the folders of runs, or --clean DAYS"),
        (["runs/latest", "--yes"], "name the folders of runs, or --clean DAYS"),
        ([], "name the folders of runs, or --clean DAYS"),
    ],
)
def test_invalid_arguments_are_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert sentence in capsys.readouterr().err
