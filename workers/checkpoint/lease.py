"""A checkpoint that one run loads is not removed by another that keeps only its last ones.

Who is going to read a checkpoint holds a shared lock (flock) on its manifest, from the choice of it until every rank
has what it needs; who removes one takes the exclusive lock first, and leaves alone what is held. It goes with the next
save. The kernel takes the lock of a dead process back, and it holds between the containers of one machine.
"""

import fcntl
import os
import shutil
from pathlib import Path

from workers.checkpoint import manifest


def hold(folder: Path) -> int | None:
    """Keep the checkpoint in `folder` until `release`; None where it is none, or one that is just being removed."""
    path = folder / manifest.FILE
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if _locked(file, fcntl.LOCK_SH) and os.path.samestat(os.fstat(file), path.stat()):
            return file
    except FileNotFoundError:  # removed between the two calls
        pass
    os.close(file)
    return None


def release(held: int | None) -> None:
    """Let it go."""
    if held is not None:
        os.close(held)


def is_held(folder: Path) -> bool:
    """Whether somebody keeps the checkpoint in `folder`."""
    try:
        file = os.open(folder / manifest.FILE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not _locked(file, fcntl.LOCK_EX)
    finally:
        os.close(file)


def remove(folder: Path) -> bool:
    """Remove the checkpoint, all of it at once for whoever looks for one; False where somebody holds it."""
    try:
        file = os.open(folder / manifest.FILE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # nobody can hold what has no manifest
        shutil.rmtree(folder, ignore_errors=True)
        return True
    try:
        if not _locked(file, fcntl.LOCK_EX):
            return False
        gone = folder.with_name(f".{folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
    finally:
        os.close(file)


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: as it was before there were any
        return True
    return True
