"""Print a lesson without running it."""

import importlib
from pathlib import Path

import pytest

import distlab.cli.run
from distlab.cli.explain import explain, main
from distlab.lab.cluster import link
from distlab.lab.config import Config
from distlab.lab.config.launchers import STARTED_BY
from distlab.lab.config.settings import modes
from distlab.lab.rank.mode_loader import load

TOP = Path(__file__).parents[2]


@pytest.mark.parametrize("mode", modes())
def test_every_mode_explains_itself(mode: str) -> None:
    lesson, config = load(mode), Config.read({"RUN_MODE": mode, "WORLD_SIZE": "3"})
    text = "\n".join(explain(config, lesson))
    assert (importlib.import_module(f"distlab.experiments.{mode}").__doc__ or "nothing").splitlines()[0] in text
    assert (TOP / "experiments" / mode / "lesson.py").read_text().rstrip() in text
    for prediction in lesson.predict(config):
        assert prediction.formula in text
    for mistake in lesson.mistakes.values():
        assert mistake.what in text


@pytest.mark.parametrize("mode", modes())
def test_a_lesson_ends_with_its_files_in_reading_order(mode: str) -> None:
    lines = explain(Config.read({"RUN_MODE": mode, "WORLD_SIZE": "3"}), load(mode))
    order = lines[lines.index("Read it in this order:") + 1 :]
    assert len(order) >= 1
    for number, line in enumerate(order, 1):
        assert line.startswith(f"  {number}. ")
        assert (TOP / line.split(" ")[3].rstrip(":,")).is_file(), line


def test_the_numbers_follow_the_settings() -> None:
    dp = load("dp")
    two, four = ("\n".join(explain(Config.read({"WORLD_SIZE": size}), dp)) for size in ("2", "4"))
    assert two != four
    assert "3.47 MB" in two  # 2(N-1)/N is 1 at two ranks: the whole model
    assert "5.20 MB" in four


def test_a_bug_is_explained_with_the_check_that_catches_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAB_BUG", "no_broadcast")
    assert main() == 0
    out = capsys.readouterr().out
    assert "The check that catches it: replicas." in out
    removed, added = (line for line in out.splitlines() if line.startswith(("-  ", "+  ")))
    assert "dist.broadcast(" in removed
    assert added.strip().startswith("+            pass  # unequal replicas would stay unequal")


def test_invalid_settings_are_refused_as_in_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAB_BUG", "no_broadcst")
    assert main() == 2
    assert "did you mean 'no_broadcast'?" in capsys.readouterr().err


def test_explain_needs_no_slow_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "SHAPED", tmp_path / "shaped")
    for name, value in {"WORLD_SIZE": "2", "LAB_NET_RATE": "100mbit", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main() == 0
    assert "LAB_NET_RATE=100mbit" in capsys.readouterr().out
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "LAB_VARIANT": "rign"}.items():
        monkeypatch.setenv(name, value)
    for name in (STARTED_BY, *distlab.cli.run.QUIET):  # which a rank sets for those that it starts, and no other test
        monkeypatch.setenv(name, "")
    assert distlab.cli.run.main() == 2
    variant, unshaped = capsys.readouterr().out.splitlines()
    assert "LAB_VARIANT='rign' is not a variant" in variant
    assert "LAB_NET_RATE=100mbit: this rank's link was not shaped" in unshaped
