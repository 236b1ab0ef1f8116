"""What a rank leaves behind while it runs: its log and its records, in the folder of the run.

A run that is refused before its ranks have joined leaves nothing, so lines that are said earlier wait in memory until
`open` names the folder. Every line is one write to the file: what a killed rank had said can be read, and no line is
half. A run that goes on in its own folder keeps one log, and the records of each attempt apart: only the last ones are
judged.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from workers.report.lines import to_line
from workers.report.output import UNHEARD, printed
from workers.report.records import Record


class Unwritable(Exception):
    """The folder of the run takes no more: the sentence to end with, exit code 1."""


class Journal:
    """The log and the records of one rank; safe to use from the main thread and from the watch."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.folder: Path | None = None
        self._said: list[str] = []
        self._log = self._lines = -1  # file descriptors, once there is a folder
        self._lock = threading.RLock()

    def open(self, folder: Path, rank: int) -> None:
        """Begin `rank<r>.jsonl` in `folder`, and begin or go on with `rank<r>.log`; raises OSError where it cannot be
        written."""
        with self._lock:
            folder.mkdir(parents=True, exist_ok=True)
            before = put_aside(folder, [rank])
            if before:
                self._said.insert(0, f"again      attempt {before + 1} of this run")
            self._log, self._lines = (_create(folder / f"rank{rank}.{kind}") for kind in ("log", "jsonl"))
            for text in self._said:
                _append(self._log, text)
            self.folder = folder

    def begin(self, folder: Path, rank: int, start: Callable[[], Record]) -> None:
        """Open it and write the first record, unless that was done: the main thread and the watch may both come to
        it."""
        with self._lock:
            if self.folder is None:
                self.open(folder, rank)
                self.write(start())

    @property
    def open_files(self) -> list[int]:
        """The descriptors of its two files, once there is a folder."""
        return [] if self.folder is None else [self._log, self._lines]

    def say(self, text: str) -> None:
        """Print `text`, and keep it in the log; who prints nothing any more has it in the log alone."""
        with self._lock:
            why = printed(text)
            self._keep(text)
            if why:
                self._keep(UNHEARD.format(why))

    def unheard(self, why: str) -> None:
        """Keep in the log that what is said is printed nowhere any more, and why."""
        with self._lock:
            self._keep(UNHEARD.format(why))

    def _keep(self, text: str) -> None:
        if self.folder is None:
            self._said.append(text)
        else:
            _append(self._log, text)

    def write(self, record: Record) -> None:
        """Keep `record`, in memory and as a line of the file."""
        with self._lock:
            self.records.append(record)
            if self.folder is not None:
                _append(self._lines, to_line(record))


def put_aside(folder: Path, ranks: Iterable[int]) -> int:
    """Rename the records of an earlier attempt of these ranks, so that nobody takes them for this one's; how many there
    were."""
    attempts = 0
    for rank in ranks:
        path = folder / f"rank{rank}.jsonl"
        attempts = len(list(folder.glob(f"rank{rank}.attempt*.jsonl")))
        if path.exists():
            attempts += 1
            path.rename(folder / f"rank{rank}.attempt{attempts}.jsonl")
    return attempts


def ranks_beyond(folder: Path, world_size: int) -> list[int]:
    """The ranks of an attempt with more ranks that has left records in `folder`."""
    names = [path.stem.removeprefix("rank") for path in folder.glob("rank*.jsonl")]
    return sorted(int(name) for name in names if name.isdecimal() and int(name) >= world_size)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _append(file: int, line: str) -> None:
    """One write a line: a kill comes before it or after it, and what a full disk takes of it is taken back."""
    data, before = f"{line}\n".encode(errors="backslashreplace"), os.fstat(file).st_size
    try:
        if os.write(file, data) < len(data):
            os.ftruncate(file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # what the next write would have met
    except OSError as error:
        raise Unwritable(
            f"the run cannot be written any more ({error.strerror}): free space, or set LAB_RUNS_DIR"
        ) from error
