"""Which checkpoint is chosen, and which are refused: before the ranks join, and later, when every byte is read."""

import json
import math
import os
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from distlab.cli.checkpoint import main
from distlab.lab.checkpoint import locate, manifest, metadata, storage
from distlab.lab.checkpoint.manifest import Unreadable
from distlab.lab.checkpoint.save import keep_last
from distlab.lab.config import Config, ConfigError
from tests.lab.checkpoint.made_up import checkpoint, config_of


def resuming(source: Path | str, runs: Path, **environ: str) -> Config:
    return config_of(LAB_RESUME=str(source), LAB_RUNS_DIR=str(runs), **environ)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with a run `a`, which has checkpoints after 10, 20 and 30 steps."""
    for step in (10, 20, 30):
        checkpoint(tmp_path / "a" / "checkpoints", step)
    return tmp_path


@pytest.mark.parametrize("source", ["a", "{}/a", "{}/a/checkpoints", "{}/a/checkpoints/step-00000030"])
def test_a_run_is_named_by_its_id_or_by_any_path(runs: Path, source: str) -> None:
    config = resuming(source.format(runs), runs)
    assert locate.refusals(config) == []
    found = locate.choose(config, pytest.fail)
    assert found is not None and found.manifest.step == 30


def test_auto_continues_the_run_with_its_name_or_begins_it(runs: Path) -> None:
    config = resuming("auto", runs, LAB_RUN_ID="a", LAB_CHECKPOINT_EVERY="5")
    found = locate.choose(config, pytest.fail)
    assert locate.refusals(config) == [] and found is not None and found.manifest.step == 30
    other = resuming("auto", runs, LAB_RUN_ID="b")
    assert locate.refusals(other) == [] and locate.choose(other, pytest.fail) is None


def change(folder: Path, **values: Any) -> None:
    """Change fields of a manifest, with a right checksum."""
    unsealed(folder, **{"schema": manifest.SCHEMA} | values)
    (folder / manifest.FILE).write_bytes(manifest.sealed((folder / manifest.FILE).read_bytes().strip()))


def unsealed(folder: Path, **values: Any) -> None:
    """Change fields of a manifest of the schema without a checksum."""
    path = folder / manifest.FILE
    found = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    path.write_text(json.dumps(found | {"schema": manifest.UNSEALED} | values) + "\n")


def a_pipe(folder: Path) -> None:
    (folder / manifest.FILE).unlink()
    os.mkfifo(folder / manifest.FILE)


def a_link_to_a_device(folder: Path) -> None:
    (folder / manifest.FILE).unlink()
    (folder / manifest.FILE).symlink_to("/dev/zero")


def flip_a_byte(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def nest_deeply(folder: Path) -> None:
    (folder / manifest.FILE).write_text("[" * 100_000)


def leave_a_shard_out(folder: Path) -> None:
    change(folder, files={name: file for name, file in manifest.read(folder).files.items() if name == ".metadata"})


UNREAD = "manifest.json that cannot be read"
WRONG = "missing or wrong fields (Expected `int`, got `str`"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped byte": (flip_a_byte, "__0_0.distcp: its checksum differs"),
    "truncated": (lambda folder: os.truncate(folder / "__0_0.distcp", 100), "__0_0.distcp has 100 of "),
    "a missing file": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "foreign": (lambda folder: (folder / manifest.FILE).unlink(), "has no manifest.json"),
    "half a manifest": (lambda folder: os.truncate(folder / manifest.FILE, 100), f"{UNREAD} ("),
    "another json": (
        lambda folder: (folder / manifest.FILE).write_text("[1]"),
        "manifest.json that the lab did not write",
    ),
    "a wrong field": (lambda folder: change(folder, step="x"), f"{WRONG} - at `$.step`)"),
    "an entry of the wrong type": (lambda folder: change(folder, seen=[0, "x"]), f"{WRONG} - at `$.seen[1]`)"),
    "another schema": (lambda folder: change(folder, schema=1), "has schema 1, and this version reads 3 and 2"),
    "no checksum": (lambda folder: unsealed(folder, schema=manifest.SCHEMA), "manifest.json whose checksum is missing"),
    "a pipe": (a_pipe, f"{UNREAD} (it is not a regular file"),
    "an endless device": (a_link_to_a_device, f"{UNREAD} (it is not a regular file"),
    "nested too deeply": (nest_deeply, f"{UNREAD} (nested too deeply)"),
    "other settings": (lambda folder: change(folder, settings={}), "was saved with RUN_MODE=unset"),
    "an unlisted shard": (leave_a_shard_out, "is incomplete (__0_0.distcp is missing)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(runs: Path, kind: str) -> None:
    damage, sentence = DAMAGE[kind]
    newest = runs / "a" / "checkpoints" / "step-00000030"
    damage(newest)
    printed: list[str] = []
    found = locate.choose(resuming("a", runs), printed.append)
    assert found is not None and found.manifest.step == 20
    (line,) = printed
    assert line.startswith(str(newest)) and sentence in line and line.endswith(": using step 20 instead")


def test_a_flipped_bit_of_a_manifest_is_named_and_the_checkpoint_before_is_used(runs: Path) -> None:
    newest = runs / "a" / "checkpoints" / "step-00000030"
    path = newest / manifest.FILE
    good, draw = path.read_bytes(), random.Random(1)
    bits = draw.sample(range(8 * len(good)), 600)
    flipped = [good[: bit // 8] + bytes([good[bit // 8] ^ (1 << bit % 8)]) + good[bit // 8 + 1 :] for bit in bits]
    for content in [*flipped, *(good[:length] for length in range(0, len(good) - 1, 7))]:
        path.write_bytes(content)
        with pytest.raises(Unreadable, match=r"manifest\.json|has schema"):
            manifest.read(newest)
    for content in (flipped[0], good[: len(good) // 2]):
        path.write_bytes(content)
        printed: list[str] = []
        found = locate.choose(resuming("a", runs), printed.append)
        assert found is not None and found.manifest.step == 20 and printed[0].startswith(f"{newest} ")


def test_a_manifest_of_the_old_schema_is_read_with_its_nan_losses(runs: Path) -> None:
    folder = runs / "a" / "checkpoints" / "step-00000030"
    unsealed(folder, losses={"flat": [1.0, float("nan"), None]})
    assert b"NaN" in (folder / manifest.FILE).read_bytes()
    found = locate.choose(resuming("a", runs), pytest.fail)
    assert found is not None and found.folder == folder
    known, nan, missing = found.manifest.losses["flat"]
    assert known == 1.0 and nan is not None and math.isnan(nan) and missing is None


def test_an_infinite_loss_is_written_as_json(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 3, losses={"flat": [1.0, math.inf, None]})
    values = json.loads((folder / manifest.FILE).read_text(), parse_constant=pytest.fail)
    assert values["losses"] == {"flat": [1.0, {"float": "inf"}, None]}
    assert manifest.read(folder).losses == {"flat": [1.0, math.inf, None]}


def test_if_no_checkpoint_is_good_each_is_named_and_auto_does_not_start_again(runs: Path) -> None:
    for folder in (runs / "a" / "checkpoints").iterdir():
        flip_a_byte(folder)
    with pytest.raises(ConfigError) as error:
        locate.choose(resuming("auto", runs, LAB_RUN_ID="a"), pytest.fail)
    assert error.value.faults[0].count("checksum differs") == 3


def test_invalid_metadata_is_damage(runs: Path) -> None:
    """Even without a wrong checksum."""
    folder = runs / "a" / "checkpoints" / "step-00000030"
    (folder / ".metadata").write_bytes(pickle.dumps({"not": "metadata"})[:-3])
    saved = manifest.read(folder)
    saved.files.pop(".metadata")
    (fault,) = locate.damage(folder, saved)
    assert ".metadata cannot be read" in fault


class Evil:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def evil(name: str, made: Path) -> bytes:
    """Return metadata that execute code, or make torch execute it."""
    if name == "a call":
        return pickle.dumps(Evil(made))
    entry: Any = BytesStorageMetadata() if name == "bytes, which torch unpickles" else Evil(made)
    return pickle.dumps(Metadata({"flat/weights.w": entry}, storage_data={}))


@pytest.mark.parametrize("name", ["a call", "a call inside", "bytes, which torch unpickles"])
def test_metadata_that_would_run_code_are_refused(
    runs: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder,) = [path for path in (runs / "a" / "checkpoints").iterdir() if path.name == "step-00000030"]
    (folder / metadata.FILE).write_bytes(evil(name, tmp_path / "made"))
    change(
        folder, files=storage.file_entries([path for path in folder.iterdir() if path.name != manifest.FILE], folder)
    )
    with pytest.raises(
        ConfigError, match=r"\.metadata cannot be read \(it names .*which no checkpoint of the lab contains"
    ):
        locate.choose(resuming(str(folder), runs), pytest.fail)
    assert main(["export", str(folder), str(tmp_path / "out.pt")]) == 2
    assert "which no checkpoint of the lab contains" in capsys.readouterr().err
    with pytest.raises(storage.Damaged):  # as each rank loads it
        storage.load_state({"flat/weights.w": torch.zeros(3)}, folder, None)
    assert not (tmp_path / "made").exists()


def test_pickled_metadata_are_read_without_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7, dtype=torch.int64), "c": torch.ones(2).bfloat16()}
    storage.save_state(state, tmp_path / "json", None)
    monkeypatch.setattr(storage.Writer, "finish", FileSystemWriter.finish)
    storage.save_state(state, tmp_path / "pickle", None)
    assert not (tmp_path / "pickle" / metadata.FILE).read_bytes().startswith(b"{")
    assert (tmp_path / "json" / metadata.FILE).read_bytes().startswith(b"{")
    old, new = (metadata.read(tmp_path / name).state_dict_metadata for name in ("pickle", "json"))
    assert old == new
    for name in ("json", "pickle"):
        assert all(
            torch.equal(tensor, state[label]) for label, tensor in storage.load_dense(tmp_path / name, "").items()
        )


def test_metadata_with_an_unknown_dtype_are_damage(tmp_path: Path) -> None:
    (tmp_path / metadata.FILE).write_text('{"a": {"dtype": "save", "size": [], "boxes": []}}')
    with pytest.raises(storage.Damaged, match="'save' is no dtype of torch"):
        storage.files_named(tmp_path)


@pytest.mark.parametrize(
    ("source", "environ", "sentences"),
    [
        ("absent", {}, ["LAB_RESUME='absent': absent does not exist"]),
        ("{}", {}, ["holds no checkpoint"]),
        ("auto", {}, ["LAB_RESUME=auto continues the run that LAB_RUN_ID names: set LAB_RUN_ID"]),
        ("a", {"LAB_SEED": "2", "LAB_LR": "0.5"}, ["was saved with LAB_SEED=1, LAB_LR=0.1, and this run has LAB_SEED=2, LAB_LR=0.5"]),
        ("a", {"LAB_DTYPE": "float64", "LAB_CLIP": "1"}, ["LAB_DTYPE=float32, LAB_CLIP=unset,"]),
        ("a", {"LAB_MODEL": "gpt"}, ["LAB_MODEL=mlp", "a text of sha256 unset"]),
        ("a", {"LAB_VARIANT": "flat,ring"}, ["holds flat and not ring"]),
    ],
)  # fmt: skip
def test_a_misfit_is_refused_before_the_ranks_join(
    runs: Path, source: str, environ: dict[str, str], sentences: list[str]
) -> None:
    (sentence,) = locate.refusals(resuming(source.format(runs), runs, **environ))
    assert all(words in sentence for words in sentences), sentence


@pytest.mark.parametrize(
    "environ", [{"WORLD_SIZE": "3"}, {"LAB_STEPS": "99"}, {"LAB_LOG": "full"}, {"LAB_VARIANT": "flat"}]
)
def test_settings_that_may_differ(runs: Path, environ: dict[str, str]) -> None:
    assert locate.refusals(resuming("a", runs, **environ)) == []


def test_a_variant_saved_under_a_former_name_fits(runs: Path) -> None:
    config = resuming("a", runs, LAB_VARIANT="per_bucket")
    assert locate.refusals(config, {"flat": "per_bucket"}) == []
    (sentence,) = locate.refusals(config, {"naive": "per_bucket"})
    assert "holds flat and not per_bucket" in sentence


def test_a_folder_that_cannot_be_written_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (sentence,) = locate.refusals(resuming("auto", runs, LAB_RUN_ID="a", LAB_CHECKPOINT_EVERY="5"))
    assert sentence.startswith(f"LAB_CHECKPOINT_EVERY=5: {runs / 'a' / 'checkpoints'} cannot be written by user")


def test_the_newest_checkpoints_are_kept(runs: Path) -> None:
    folder = runs / "a" / "checkpoints"
    (folder / "notes").mkdir()
    keep_last(folder, 2)
    assert {path.name for path in folder.iterdir()} == {"step-00000020", "step-00000030", "notes"}


def test_a_manifest_reads_as_it_was_written(runs: Path) -> None:
    folder = runs / "a" / "checkpoints" / "step-00000030"
    assert manifest.read(folder).step == 30
    with pytest.raises(Unreadable, match="has no manifest"):
        manifest.read(runs)


def test_no_file_is_unpickled_anywhere_else() -> None:
    """Except messages between processes of one command, and the files of a puzzle, whose code runs anyway."""
    package = Path(locate.__file__).parents[2]
    sources = {
        path: path.read_text()
        for path in package.rglob("*.py")
        if not {"puzzle", "ranks", "script_samples.py"} & set(path.relative_to(package).parts)
    }
    calls = [line for text in sources.values() for line in re.findall(r"(?:torch|np|numpy|pickle)\.loads?\(.*", text)]
    assert calls and all("weights_only=True" in call for call in calls)
