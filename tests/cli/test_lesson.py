"""`distlab lesson`: lists what there is, writes an exercise once, refuses what is none."""

from pathlib import Path

import pytest

from distlab.cli.lesson import LESSONS, main
from distlab.tools.lessons.exercises import EXERCISES


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(LESSONS)
    assert set(EXERCISES) < set(LESSONS)


def test_what_is_no_lesson_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exercise1"]) == 2
    assert "'exercise1' is not a lesson (did you mean 'exercise-1'?), allowed: exercise-1, " in capsys.readouterr().err


def test_an_exercise_is_written_once_and_then_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["exercise-2"]) == 1
    file = tmp_path / "exercises" / "exercise_2.py"
    assert file.read_text() == EXERCISES["exercise-2"].text
    assert "fill in the gaps `...`" in capsys.readouterr().out
    assert main(["exercise-2"]) == 1
    assert "wrong      rank 0 of 1: accumulation_steps(4, 16) has a gap" in capsys.readouterr().out
    file.write_text(
        "def accumulation_steps(microbatch, batch):\n    return batch // microbatch\n"
        "def accumulated(gradients):\n    return sum(gradients), sum(gradients) / len(gradients)\n"
        "def scaled_rate(base_rate, base_batch, batch):\n    return base_rate * batch / base_batch\n"
    )
    assert main(["exercise-2"]) == 0
    assert "right      exercise-2" in capsys.readouterr().out


def test_a_demonstration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zombie"]) == 0
    assert "a zombie (state Z)" in capsys.readouterr().out
