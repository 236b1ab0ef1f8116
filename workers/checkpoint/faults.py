"""The classic mistake of a save, made on purpose by LAB_BUG=save_without_barrier: complete before all shards are there.

Rank 0 asks nobody and publishes what it sees. Whether the others' files are there then is a race; here they always lose it.
(The mistake of a resume, resume_repeats_epoch, is a line in course.py.)
"""

from collections.abc import Callable
from pathlib import Path


def hold_back(files: list[Path], partial: Path) -> tuple[list[Path], Callable[[Path], None]]:
    """Take `files` out of the partial folder: the files that are there now, none, and what puts them into the published one."""
    waiting = {path.relative_to(partial): path.read_bytes() for path in files}
    for path in files:
        path.unlink()

    def arrive(final: Path) -> None:
        for name, content in waiting.items():
            (final / name).write_bytes(content)

    return [], arrive
