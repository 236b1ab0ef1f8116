"""Which checkpoints of a folder are chosen, kept and removed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.lab.checkpoint import locate, manifest
from distlab.lab.checkpoint.locate import listed_steps, newer_good_steps
from distlab.lab.checkpoint.save import keep_last


def saved(folder: Path, *steps: int) -> None:
    for step in steps:
        made = folder / manifest.folder_name(step)
        made.mkdir(parents=True)
        (made / manifest.FILE).write_text("{}")


@pytest.mark.parametrize(("good", "newer"), [(lambda _: True, [3, 4]), (lambda _: False, [])])
def test_newer_good_checkpoints_are_found(tmp_path: Path, good: Callable[[Path], bool], newer: list[int]) -> None:
    saved(tmp_path / "checkpoints", 1, 2, 3, 4)
    (tmp_path / "checkpoints" / "step-later").mkdir()
    assert listed_steps(tmp_path / "checkpoints") == {1, 2, 3, 4}
    assert newer_good_steps(tmp_path, 2, good) == newer
    assert newer_good_steps(tmp_path, 4, good) == []


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_that_is_being_loaded_is_not_removed(tmp_path: Path) -> None:
    first = tmp_path / manifest.folder_name(1)
    saved(tmp_path, 1)
    readers = [locate.lock_for_reading(first) for _ in range(2)]
    for step in (2, 3, 4):
        saved(tmp_path, step)
        keep_last(tmp_path, 1)
        assert names(tmp_path) == ["step-00000001", manifest.folder_name(step)]
    for reader in readers:
        locate.release(reader)
    keep_last(tmp_path, 1)
    assert names(tmp_path) == ["step-00000004"]


def test_a_removed_checkpoint_cannot_be_locked(tmp_path: Path) -> None:
    folder = tmp_path / manifest.folder_name(1)
    saved(tmp_path, 1)
    assert locate.remove(folder)
    assert locate.lock_for_reading(folder) is None
    assert names(tmp_path) == []
    (tmp_path / "step-00000002").mkdir()
    assert locate.lock_for_reading(tmp_path / "step-00000002") is None
    assert locate.remove(tmp_path / "step-00000002")
