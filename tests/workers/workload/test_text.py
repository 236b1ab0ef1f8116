"""The text of gpt: read the same everywhere, and refused in one sentence where there is none."""

from pathlib import Path
from typing import Any

import pytest

from workers.config import Config
from workers.workload import text


def config_of(path: Path | None = None, **settings: str) -> Config:
    return Config.read(settings | ({"LAB_TEXT": str(path)} if path else {}))


def test_the_default_is_pythons_own_source() -> None:
    first = text.read(config_of())
    assert 2**20 < len(first) <= text.MAX_BYTES
    assert first == text.read(config_of())
    assert b"import" in first
    assert text.refusals(config_of()) == []


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second ")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "sub" / "c").write_bytes(b"third")
    assert text.read(config_of(tmp_path)) == b"first second third"


def test_no_file_is_opened_once_there_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 60)
    opened: list[str] = []
    plain = Path.open

    def counted(path: Path, mode: str) -> Any:
        opened.append(path.name)
        return plain(path, mode)

    monkeypatch.setattr(text, "MAX_BYTES", 100)
    monkeypatch.setattr(Path, "open", counted)
    assert text.read(config_of(tmp_path)) == b"a" * 60 + b"b" * 40
    assert opened == ["a", "b"]


def test_a_long_file_is_cut(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * (text.MAX_BYTES + 10))
    assert len(text.read(config_of(tmp_path / "long"))) == text.MAX_BYTES


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"x" * 64, "holds 64 bytes, and a sample of LAB_SEQ=64 needs 65 or more"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    faults = text.refusals(config_of(path))
    assert len(faults) == 1
    assert words in faults[0]
    assert str(path) in faults[0]
    assert text.refusals(config_of(path, LAB_MODEL="mlp")) == []


def test_one_sample_is_enough(tmp_path: Path) -> None:
    import torch

    from workers.workload.data import Batches

    (tmp_path / "text").write_bytes(bytes(range(65)))
    config = config_of(tmp_path / "text")
    assert text.refusals(config) == []
    inputs, targets, _ = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64).full(2)
    assert inputs[3].tolist() == list(range(64))
    assert targets[3].tolist() == list(range(1, 65))
