"""The checks of benchmarks/engines: a run must equal the undisturbed run, and differences are found."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.engines import __main__, nodes
from benchmarks.engines.drill import saved, timed, unlike, until


def write_run(folder: Path, name: str, weights: str, resumed: object = None) -> Path:
    """Make a run's folder with its run.json."""
    (folder / name).mkdir()
    run = {"variants": [{"weights_sha256": weights}], "resumed": resumed}
    (folder / name / "run.json").write_text(json.dumps(run))
    return folder / name


def test_a_resumed_run_must_have_the_undisturbed_weights(tmp_path: Path) -> None:
    whole = write_run(tmp_path, "whole", "a" * 64)
    assert unlike(write_run(tmp_path, "same", "a" * 64, {"step": 2}), whole) == []
    assert unlike(write_run(tmp_path, "anew", "a" * 64), whole) == ["it was not resumed"]
    assert unlike(write_run(tmp_path, "other", "b" * 64, {"step": 2}), whole) == [
        "weights bbbbbbbbbbbb in place of aaaaaaaaaaaa"
    ]


def test_a_run_without_a_folder_is_a_finding(tmp_path: Path) -> None:
    drill = timed("lost", unlike, tmp_path / "nothing", tmp_path / "whole")
    assert drill.what == "lost"
    assert "No such file or directory" in drill.wrong[0]


def test_a_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engines.drill.SAVES_S", 0.2)
    assert not saved(tmp_path)
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert saved(tmp_path)
    assert not until(lambda: False, 0.2)


@pytest.mark.parametrize(
    ("words", "who", "sentence"),
    [
        (["slrum"], 0, "refused    slrum is no engine here, allowed: torchrun, slurm, ray"),
        ([], 1000, "refused    machines of namespaces need root: run it as root, or in a virtual machine"),
    ],
)
def test_an_unknown_engine_is_refused(
    words: list[str], who: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: who)
    assert __main__.main(words) == 2
    assert capsys.readouterr().out.strip() == sentence


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(nodes, "NEEDED", ("sh", "no-such-program"))
    assert nodes.missing() == "not installed: no-such-program (Debian: iproute2, util-linux)"
    assert __main__.main([]) == 2
    assert "not installed: no-such-program" in capsys.readouterr().out
