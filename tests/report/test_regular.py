"""What is read is a regular file of a bounded size, whatever else is there."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distlab.report.reading import read_regular


def test_a_file_is_read_and_so_is_one_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file", 3) == read_regular(tmp_path / "link", 3) == b"abc"


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # without a block of it on the disk


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (os.mkfifo, "it is a pipe"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "a folder": (Path.mkdir, "it is a folder"),
    "a socket": (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "it is a socket"),
    "a huge file": (huge, "it holds 1099511627776 bytes"),
    "a loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_else_is_refused_at_once_and_said(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make, sentence = KINDS[kind]
    make(Path("other"))
    with pytest.raises(OSError, match=sentence):
        read_regular(Path("other"), 1000)
