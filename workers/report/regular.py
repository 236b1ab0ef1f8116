"""The files in a run's folder as their readers open them: regular ones up to a size, and nothing that waits.

Whoever can write to a folder of runs can leave anything there: a pipe, which an open waits for, a link to a device
without an end, a folder, a file larger than memory. Each is an OSError at once, whose words say what is there.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


@contextmanager
def regular(path: Path, most_bytes: int) -> Iterator[BinaryIO]:
    """The file, open to be read; raises OSError where it is none, or a larger one."""
    _refuse(path, path.stat(), most_bytes)  # before the open, which means something to a device
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _refuse(path, os.fstat(descriptor), most_bytes)
        yield file


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All of it, and what it has grown by meanwhile up to so many bytes; raises OSError."""
    with regular(path, most_bytes) as file:
        return file.read(most_bytes)


def _refuse(path: Path, found: os.stat_result, most_bytes: int) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'no file')}, and only a regular file is read", str(path))
    if found.st_size > most_bytes:
        why = f"it holds {found.st_size} bytes, and at most {most_bytes} are read"
        raise OSError(errno.EFBIG, why, str(path))
