"""One run a folder: whoever claims `runs/<run_id>` first has it, until the last of its ranks is gone.

The file `.run` in it holds the token of the run, the same on all of its ranks and another in every other run. A rank
holds a shared lock on it (flock), which the kernel takes back when the process ends, however it ends, and which holds
between the containers of one machine. Two runs with one LAB_RUN_ID both find no folder before they join; one of them
writes its token here, under an exclusive lock, and the other is refused before it has touched anything. A run that goes
on (LAB_RESUME=auto) takes the folder over, once no rank of the attempt before holds it any more.
"""

import fcntl
import os
import random
import time
from pathlib import Path

from workers.report.regular import regular

FILE = ".run"
GONE_S = 10.0  # ranks of a broken attempt end within 5 s of each other
PATIENCE_S = 2.0  # for a lock that somebody holds for two calls of the kernel
TOKEN_BYTES = 256
MOST_BYTES = 1 << 20  # of the file, whose lock is looked at and not its words


class Taken(Exception):
    """Another run has the folder."""


def claim(folder: Path, token: str, *, goes_on: bool) -> int:
    """Make `folder` if need be and hold it for the run of this token; returns what holds it, a descriptor to be left
    open.

    Raises Taken where another run has it, OSError where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + (GONE_S if goes_on else PATIENCE_S)
    while True:
        owner = os.pread(file, TOKEN_BYTES, 0) if _locked(file, fcntl.LOCK_SH) else None
        if owner == token.encode():
            return file
        if (owner and not goes_on) or time.monotonic() > deadline:
            os.close(file)
            raise Taken(f"another run writes to {folder}")
        # Nobody's, or that of an attempt before: it is taken by the one who finds nobody else at it.
        if owner is not None and _locked(file, fcntl.LOCK_EX) and os.pread(file, TOKEN_BYTES, 0) == owner:
            os.ftruncate(file, 0)
            os.pwrite(file, token.encode(), 0)
        else:
            _locked(file, fcntl.LOCK_UN)
            time.sleep(random.uniform(0.005, 0.05))  # two who wait for each other do not go on doing so in step


def has_claimed(folder: Path, token: str) -> bool:
    """Whether the run of this token has the folder."""
    try:
        return (folder / FILE).read_bytes() == token.encode()
    except OSError:
        return False


def is_held(folder: Path) -> bool:
    """Whether a rank of the run in this folder is alive, as far as this machine's kernel knows."""
    try:
        with regular(folder / FILE, MOST_BYTES) as file:
            return not _locked(file.fileno(), fcntl.LOCK_EX)
    except OSError:
        return False


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the token alone decides
        return True
    return True
