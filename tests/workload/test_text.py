"""The text of gpt: read the same everywhere, and refused in one sentence where there is none."""

import os
import socket
from pathlib import Path

import pytest

from distlab.config import Config
from distlab.workload import data


def config_of(path: Path | None = None, **settings: str) -> Config:
    return Config.read(settings | ({"LAB_TEXT": str(path)} if path else {}))


def test_the_default_is_pythons_own_source() -> None:
    first = data.read_text(config_of())
    assert 2**20 < len(first) <= data.MAX_BYTES
    assert first == data.read_text(config_of())
    assert b"import" in first
    assert data.text_refusals(config_of()) == []


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second ")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "sub" / "c").write_bytes(b"third")
    assert data.read_text(config_of(tmp_path)) == b"first second third"


def test_no_file_is_opened_once_there_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 60)
    opened: list[str] = []
    plain = os.open

    def counted(path: Path, flags: int) -> int:
        opened.append(path.name)
        return plain(path, flags)

    monkeypatch.setattr(data, "MAX_BYTES", 100)
    monkeypatch.setattr(os, "open", counted)
    assert data.read_text(config_of(tmp_path)) == b"a" * 60 + b"b" * 40
    assert opened == ["a", "b"]


def test_a_long_file_is_cut(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * (data.MAX_BYTES + 10))
    assert len(data.read_text(config_of(tmp_path / "long"))) == data.MAX_BYTES


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
    faults = data.text_refusals(config_of(path))
    assert len(faults) == 1
    assert words in faults[0]
    assert str(path) in faults[0]
    assert data.text_refusals(config_of(path, LAB_MODEL="mlp")) == []


def test_one_sample_is_enough(tmp_path: Path) -> None:
    import torch

    from distlab.workload.data import Batches

    (tmp_path / "text").write_bytes(bytes(range(65)))
    config = config_of(tmp_path / "text")
    assert data.text_refusals(config) == []
    inputs, targets, _ = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64).full(2)
    assert inputs[3].tolist() == list(range(64))
    assert targets[3].tolist() == list(range(1, 65))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (fault,) = data.text_refusals(config_of(tmp_path / "pipe"))
    assert "is neither a file nor a folder: a pipe or a device gives each rank another text" in fault
    assert data.digest(config_of(tmp_path / "pipe")) == ""


@pytest.mark.parametrize("device", ["/dev/urandom", "/dev/zero", "/dev/null"])
def test_a_device_is_refused(device: str) -> None:
    (fault,) = data.text_refusals(config_of(Path(device)))
    assert "is neither a file nor a folder" in fault


@pytest.mark.parametrize("path", ["x" * 300, "/x" * 3000, "/proc/self/environ", "/proc/kmsg"])
def test_what_has_no_bytes_of_its_own_is_refused(path: str) -> None:
    (fault,) = data.text_refusals(config_of(Path(path)))
    assert fault.startswith("LAB_TEXT=")
    assert len(fault) < 400


def test_in_a_folder_only_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"text")
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "c").symlink_to("/dev/urandom")
    (tmp_path / "d").symlink_to(tmp_path / "d")
    (tmp_path / "e").symlink_to(tmp_path)  # a folder within itself
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "f"))
        assert data.read_text(config_of(tmp_path)) == b"text"


def test_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (fault,) = data.text_refusals(config_of(tmp_path / "loop"))
    assert "cannot be read: Too many levels of symbolic links" in fault


def test_a_folder_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_ENTRIES", 5)
    for number in range(6):
        (tmp_path / str(number)).touch()
    (fault,) = data.text_refusals(config_of(tmp_path))
    assert "holds more than 5 files and folders" in fault


def test_ranks_compare_a_checksum_of_what_they_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"one")
    before = data.digest(config_of(tmp_path / "text"))
    (tmp_path / "text").write_bytes(b"two")
    assert before != data.digest(config_of(tmp_path / "text"))
