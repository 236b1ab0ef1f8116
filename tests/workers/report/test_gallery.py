"""The command: one page of all runs in a folder, and a word for whatever else is there."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.workers.report.made_up import good_run, pipeline_run, with_check, written
from workers.report.gallery import main
from workers.report.judge import judge, write_run
from workers.report.records import Ranks


def judged(folder: Path, records: Ranks) -> Path:
    """A run's folder with its verdict."""
    write_run(written(folder, records), judge(records))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run that passed, with its report, one that failed, one without a verdict, and what is none."""
    folder = tmp_path / "runs"
    (judged(folder / "pp 1#a", pipeline_run(2)) / "report.html").touch()
    judged(folder / "failed", with_check(good_run(3), "weights", 1.0))
    written(folder / "cut", good_run(1))
    (folder / "notes").mkdir()
    (folder / "elsewhere").symlink_to(tmp_path)
    (folder / "latest").symlink_to("failed")
    return folder


def cards(page: str) -> list[str]:
    return re.findall(r'<li class="card".*?</li>', page)


def test_every_run_has_a_card_and_all_else_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", str(runs)]) == 0
    page = (runs / "index.html").read_text()
    size = f"{(runs / 'index.html').stat().st_size / 1000:.1f} kB"
    said = capsys.readouterr().out
    assert said == f"gallery    {runs}/index.html: 3 runs, {size}; elsewhere is a link; notes holds no run\n"
    assert "Not here: elsewhere is a link; notes holds no run." in page
    found = {card.partition("<h2>")[2].partition("</h2>")[0]: card for card in cards(page)}
    assert set(found) == {
        '<a href="pp%201%23a/report.html">pp 1#a</a>',
        'failed <span class="soft">no report.html</span>',
        'cut <span class="soft">no report.html</span>',
    }
    assert [card.count("latest") for name, card in found.items() if name.startswith("failed")] == [1]
    assert sum('data-verdict="unfinished" data-mode="dp"' in card for card in cards(page)) == 1
    assert "dp · 3 ranks" in page and "dp · 1 rank<" in page and "gpipe, 1f1b" in page


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for name, hours in (("older", 5), ("oldest", 9), ("newest", 1)):
        for path in written(tmp_path / name, {0: good_run(1)[0][:1]}).iterdir():
            os.utime(path, (time.time() - hours * 3600, time.time() - hours * 3600))
    assert main(["--runs", str(tmp_path)]) == 0
    found = re.findall(r"<h2>(\w+)", (tmp_path / "index.html").read_text())
    assert found == ["newest", "older", "oldest"]


def test_links_lead_from_where_the_page_lies(runs: Path) -> None:
    (runs.parent / "out").mkdir()
    assert main(["--runs", str(runs), "-o", str(runs.parent / "out" / "all.html")]) == 0
    assert 'href="../runs/pp%201%23a/report.html"' in (runs.parent / "out" / "all.html").read_text()


def test_the_folder_is_that_of_the_settings(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_RUNS_DIR", str(runs))
    assert main([]) == 0
    assert (runs / "index.html").is_file()


def test_a_folder_without_runs_has_a_page_that_says_so(tmp_path: Path) -> None:
    assert main(["--runs", str(tmp_path)]) == 0
    assert "No run yet" in (tmp_path / "index.html").read_text()


def test_what_cannot_be_read_or_written_is_one_sentence(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", str(runs / "absent")]) == 2
    assert main(["--runs", str(runs), "-o", str(runs / "absent" / "x.html")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"refused    {runs}/absent cannot be read: No such file or directory",
        f"broken     {runs}/absent/x.html cannot be written: No such file or directory",
    ]


def test_settings_that_are_wrong_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAB_STEP", "5")
    assert main([]) == 2
    assert "LAB_STEP is not a variable of the lab" in capsys.readouterr().out


def test_500_runs_take_seconds_and_few_megabytes(tmp_path: Path) -> None:
    model = judged(tmp_path / "model", pipeline_run(4))
    for number in range(500):
        copy = tmp_path / "runs" / f"run-{number}"
        copy.mkdir(parents=True)
        for path in model.iterdir():
            os.link(path, copy / path.name)
    began = time.process_time()
    assert main(["--runs", str(tmp_path / "runs")]) == 0
    assert time.process_time() - began < 15
    page = tmp_path / "runs" / "index.html"
    assert page.stat().st_size < 3_500_000
    assert len(cards(page.read_text())) == 500
