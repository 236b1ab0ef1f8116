"""What a save and a choice claim is looked at by another way than it was made, and what is wrong shows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distlab.lab.checkpoint import locate, manifest, save, storage
from distlab.lab.checkpoint.locate import listed_steps, passed_over
from distlab.lab.checkpoint.save import allowed_s, digests, keep_last, unaccounted_s, unlike, wrongly_kept
from distlab.techniques.collectives.sharded_tensor import flat_piece


def state_of(value: float) -> dict[str, object]:
    return {"v/weights.whole": torch.full((3, 4), value), "v/optimizer.step.whole": torch.tensor(value)}


@pytest.mark.parametrize("moved", [0.0, 0.5])
def test_a_copy_that_goes_on_with_the_training_is_seen(tmp_path: Path, moved: float) -> None:
    state = state_of(1.0)
    wanted = digests(state)
    state["v/weights.whole"] += moved  # type: ignore[operator]
    storage.save_state(state, tmp_path, None)
    assert unlike(state_of(0.0), wanted, tmp_path, None) == (["v/weights.whole"] if moved else [])


def test_what_is_read_back_is_read_in_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "MOST_BYTES", 8)
    state = {str(number): torch.zeros(2) for number in range(3)}
    assert list(save.bundles(state)) == [["0"], ["1"], ["2"]]
    assert save.bundles({}).__next__ is not None
    assert list(save.bundles({})) == []


def test_every_part_of_a_piece_is_hashed() -> None:
    run = torch.arange(5.0)
    piece = flat_piece(run, 2, torch.Size((3, 4)))
    before = digests({"w": piece})
    run[-1] += 1
    after = digests({"w": piece})
    assert [one == other for one, other in zip(before["w"], after["w"], strict=True)] == [True, False]
    assert [part.shape for part in storage.parts(storage.blank(piece))] == [box.shape for _, box in piece.boxes]


def saved(folder: Path, *steps: int) -> None:
    for step in steps:
        made = folder / manifest.folder_name(step)
        made.mkdir(parents=True)
        (made / manifest.FILE).write_text("{}")


@pytest.mark.parametrize(
    ("there", "wrong"),
    [((3, 4), 0), ((1, 2), 4), ((2, 3, 4), 1), ((4,), 1), ((1, 4), 2)],
)
def test_what_is_kept_are_the_newest_and_no_more(tmp_path: Path, there: tuple[int, ...], wrong: int) -> None:
    saved(tmp_path, *there)
    assert wrongly_kept(tmp_path, {1, 2, 3}, 4, 2)[0] == wrong


def test_what_another_run_reads_may_stay(tmp_path: Path) -> None:
    saved(tmp_path, 2, 3, 4)
    reader = locate.lock_for_reading(tmp_path / manifest.folder_name(2))
    assert wrongly_kept(tmp_path, {2, 3}, 4, 2)[0] == 0
    locate.release(reader)
    assert wrongly_kept(tmp_path, {2, 3}, 4, 2)[0] == 1


@pytest.mark.parametrize(("good", "newer"), [(lambda _: True, [3, 4]), (lambda _: False, [])])
def test_a_newer_one_that_is_good_is_not_passed_over(
    tmp_path: Path, good: Callable[[Path], bool], newer: list[int]
) -> None:
    saved(tmp_path / "checkpoints", 1, 2, 3, 4)
    (tmp_path / "checkpoints" / "step-later").mkdir()
    assert listed_steps(tmp_path / "checkpoints") == {1, 2, 3, 4}
    assert passed_over(tmp_path, 2, good) == newer
    assert passed_over(tmp_path, 4, good) == []


def test_a_save_that_says_nothing_of_what_it_held_up_is_seen() -> None:
    assert unaccounted_s(2.0, 1.9) <= allowed_s(2.0)
    assert unaccounted_s(2.0, 0.0) > allowed_s(2.0)
    assert unaccounted_s(2.0, 2.1) > allowed_s(2.0), "more than there was"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_that_is_loaded_outlives_newer_ones(tmp_path: Path) -> None:
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


def test_what_is_gone_cannot_be_held(tmp_path: Path) -> None:
    folder = tmp_path / manifest.folder_name(1)
    saved(tmp_path, 1)
    assert locate.remove(folder)
    assert locate.lock_for_reading(folder) is None
    assert names(tmp_path) == []
    (tmp_path / "step-00000002").mkdir()
    assert locate.lock_for_reading(tmp_path / "step-00000002") is None
    assert locate.remove(tmp_path / "step-00000002")
