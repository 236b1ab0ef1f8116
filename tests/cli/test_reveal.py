"""`distlab reveal RUN`: which bug a run had, what it breaks, which check caught it; and what its files did not say."""

import base64
import os
import re
import zlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from distlab.cli.report import main as report
from distlab.cli.reveal import main
from distlab.config import Config
from distlab.rank.injected_bug import bug_of
from distlab.rank.mode_loader import load
from distlab.report.log import verdict_lines
from distlab.report.mystery import seal_mistake
from distlab.report.records import Check, Ranks, Start
from distlab.report.verdict import judge
from tests.launched import ended_warm
from tests.report.made_up import MISTAKE, bent, good_run, mistaken, plus, written

CAUGHT = Check("naive", "replicas", 0.5, 0.0)


def mystery(records: Ranks) -> Ranks:
    """The same run, whose bug is not told."""
    sealed = seal_mistake("mystery:7", "dp", MISTAKE)
    return bent(records, lambda record: replace(record, mistake=sealed) if isinstance(record, Start) else record)


def told(records: Ranks, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(written(folder / "run", records))]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_it_tells_what_the_log_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = plus(mystery(good_run()), CAUGHT)
    log = "\n".join(verdict_lines(judge(records), records, None))
    assert "LAB_BUG=mystery:7: one of the bugs that dp can show" in log
    assert "caught, as expected" in log
    assert "no_broadcast" not in log and MISTAKE["what"] not in log
    said = told(records, tmp_path, capsys)
    assert "bug LAB_BUG=mystery:7 was no_broadcast: every rank begins from weights of its own" in said
    assert "check replicas is meant to catch it" in said
    assert "seen caught by naive replicas: differs by 5.0e-01" in said


def test_a_mystery_that_was_missed_is_told_as_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = mystery(good_run())
    last = verdict_lines(judge(records), records, None)[-1]
    assert "not caught: the check that is meant for it did not run" in last
    assert "replicas" not in last
    assert "not caught: the replicas check did not run" in told(records, tmp_path, capsys)


def test_a_bug_that_was_named_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "bug LAB_BUG=no_broadcast: every rank" in told(plus(mistaken(good_run()), CAUGHT), tmp_path, capsys)


def test_a_run_without_a_bug_and_what_is_no_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(written(tmp_path / "run", good_run()))]) == 2
    assert "had no injected bug: LAB_BUG was not set" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.startswith("refused    ")


@pytest.mark.parametrize("sealed", ["?", "eJx", base64.b64encode(zlib.compress(b"[" * 100_000)).decode()])
def test_a_bug_that_was_damaged_is_refused(sealed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mistake = seal_mistake("mystery:7", "dp", MISTAKE) | {"sealed": sealed}
    records = bent(good_run(), lambda record: replace(record, mistake=mistake) if isinstance(record, Start) else record)
    folder = str(written(tmp_path / "run", plus(records, CAUGHT)))
    assert main([folder]) == report([folder]) == 2
    assert capsys.readouterr().err.count("the injected bug mystery:7 was written otherwise") == 2


def test_a_whole_run_names_its_bug_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real ranks, with their logs, run.json, the report and what the launcher prints."""
    settings = {
        "RUN_MODE": "dp", "WORLD_SIZE": "2", "LAB_BUG": "mystery:7", "LAB_MODEL": "mlp", "LAB_DEPTH": "2",
        "LAB_WIDTH": "16", "LAB_STEPS": "2", "LAB_RUNS_DIR": str(tmp_path), "LAB_RUN_ID": "hidden",
    }  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not re.match(r"LAB_|RUN_MODE|WORLD_SIZE|RANK", name)}
    done = ended_warm("workers", environ=clean | settings, timeout_s=100)
    assert done.returncode == 1, done.stdout
    mode = load("dp")
    name = bug_of(Config.read(settings), mode)
    files = [file for file in (tmp_path / "hidden").rglob("*") if file.is_file()]
    assert {"run.json", "report.html", "rank0.log", "rank1.jsonl"} <= {file.name for file in files}
    texts = {"what is printed": done.stdout} | {
        file.name: file.read_bytes().decode("utf-8", "replace") for file in files
    }
    named = {where: bug for where, text in texts.items() for bug in mode.mistakes if re.search(rf"\b{bug}\b", text)}
    assert named == {}
    assert "LAB_BUG=mystery:7" in done.stdout.rpartition("rerun")[2], "the rerun line repeats it"
    assert main([str(tmp_path / "hidden")]) == 0
    assert f"LAB_BUG=mystery:7 was {name}:" in " ".join(capsys.readouterr().out.split())
