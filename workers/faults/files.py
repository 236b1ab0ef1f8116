"""A disk that is full, and a checkpoint in which a byte changes after it was written.

The full disk is Linux's /dev/full, on which every write fails as on a disk without room: it takes the place of this
rank's log and records, so no other process meets it. A damaged checkpoint is one bit of one of its files.
"""

import os
import random
from pathlib import Path

FULL = Path("/dev/full")


def fill(descriptors: list[int]) -> None:
    """From now on each write to these open files meets a disk that is full; raises OSError on a system without
    /dev/full."""
    full = os.open(FULL, os.O_WRONLY | os.O_APPEND)
    try:
        for each in descriptors:
            os.dup2(full, each)
    finally:
        os.close(full)


def damage(checkpoint: Path, files: list[str], draw: random.Random) -> str:
    """Flip one bit of one of the checkpoint's `files`; returns the name of the file."""
    name = draw.choice(sorted(files))
    path = checkpoint / name
    place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
    return name
