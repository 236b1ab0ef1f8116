"""A checkpoint that somebody loads stays, until nobody does."""

from pathlib import Path

from distlab.checkpoint import locate, manifest
from distlab.checkpoint.save import keep_last


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(folder: Path, step: int) -> Path:
    made = folder / manifest.folder_name(step)
    made.mkdir()
    (made / manifest.FILE).write_text("{}")
    return made


def test_a_checkpoint_that_is_loaded_outlives_newer_ones(tmp_path: Path) -> None:
    first = saved(tmp_path, 1)
    readers = [locate.lock_for_reading(first) for _ in range(2)]
    for step in (2, 3, 4):
        saved(tmp_path, step)
        keep_last(tmp_path, 1)
        assert checkpoints(tmp_path) == ["step-00000001", manifest.folder_name(step)]
    for reader in readers:
        locate.release(reader)
    keep_last(tmp_path, 1)
    assert checkpoints(tmp_path) == ["step-00000004"]


def test_what_is_gone_cannot_be_held(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    assert locate.remove(folder)
    assert locate.lock_for_reading(folder) is None
    assert checkpoints(tmp_path) == []
    (tmp_path / "step-00000002").mkdir()
    assert locate.lock_for_reading(tmp_path / "step-00000002") is None
    assert locate.remove(tmp_path / "step-00000002")
