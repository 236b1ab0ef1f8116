"""The runs in a folder: which there are, when each last wrote, its bytes on the disk, and which may be going on.

A run is a folder with records or a verdict in it, or one that a run has claimed; a link to a run elsewhere is none.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workers.report.claim import FILE, is_held
from workers.report.latest import LATEST
from workers.report.lines import record_files
from workers.report.text import printable

# A run whose ranks hold its folder is going on; on another machine none can be seen to. There one whose last record no
# verdict followed is going on, or was killed; its ranks wait LAB_COLLECTIVE_TIMEOUT_S for
# each other, by default half of this.
SILENT_S = 600


class Stored(NamedTuple):
    """A finished, broken or running run: its folder, when it last wrote a record, its bytes on the disk, and what else
    is to be said of it."""

    folder: Path
    written_at: float
    nbytes: int
    checkpoints: int
    latest: bool
    running: bool  # its ranks are alive, or may be so on another machine

    @property
    def note(self) -> str:
        """What somebody has to know who removes it."""
        notes = ["latest"] * self.latest + ["may be running"] * self.running
        return ", ".join(notes + [f"{self.checkpoints} checkpoints"] * bool(self.checkpoints))


def stored_runs(runs: Path, now: float) -> list[Stored]:
    """Every run in this folder, the newest first."""
    return surveyed(runs, now)[0]


def surveyed(runs: Path, now: float) -> tuple[list[Stored], list[str]]:
    """The same, and a sentence for each folder of which nothing can be known; raises OSError where `runs` cannot be
    read."""
    if not runs.is_dir():
        return [], []
    found, faults = [], []
    for folder in sorted(runs.iterdir()):
        try:
            stored = stored_run(folder, now)
        except OSError as error:
            faults.append(f"{printable(folder.name)} cannot be read: {error.strerror}")
            continue
        if stored:
            found.append(stored)
    return sorted(found, key=lambda stored: (-stored.written_at, stored.folder.name)), faults


def stored_run(folder: Path, now: float) -> Stored | None:
    """The run in this folder, or None where it holds none; raises OSError where it cannot be read."""
    verdict, records = folder / "run.json", list(record_files(folder).values())
    marks = records or [path for path in (verdict, folder / FILE) if path.is_file()]
    if folder.is_symlink() or not marks:
        return None
    written_at = max(path.lstat().st_mtime for path in marks)
    checkpoints = len(list(folder.glob("checkpoints/step-*")))
    judged = verdict.is_file() and verdict.stat().st_mtime >= written_at
    running = is_held(folder) or (not judged and now - written_at < SILENT_S)
    latest = os.path.realpath(folder.parent / LATEST) == os.path.realpath(folder)  # a link may lead to itself
    return Stored(folder, written_at, bytes_in(folder), checkpoints, latest, running)


def bytes_in(folder: Path) -> int:
    """Of all files below it that can be seen; links are not followed, and a run that goes on may remove some."""
    num_bytes, left = 0, [str(folder)]
    while left:
        with suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                else:
                    with suppress(OSError):
                        num_bytes += entry.stat(follow_symlinks=False).st_size
    return num_bytes
