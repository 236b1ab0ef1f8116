"""What a rank leaves behind while it runs: its log and its records, in the folder of the run.

A run that is refused before its ranks have joined leaves nothing, so lines that are said earlier wait in memory until
`open` names the folder. Every line is one write to the file: what a killed rank had said can be read, and no line is
half. A run that goes on in its own folder keeps one log, and the records of each attempt apart: only the last ones are
judged.
"""

import errno
import fcntl
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import msgspec

from distlab.report.reading import BrokenRecord, from_json, read_regular, record_files, regular, to_line
from distlab.report.records import Record, Run, WorldSize
from distlab.report.standard_streams import UNHEARD, printed
from distlab.report.table import printable


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


# One run a folder: whoever claims `runs/<run_id>` first has it, until the last of its ranks is gone.
#
# The file `.run` in it holds the token of the run, the same on all of its ranks and another in every other run. A
# rank holds a shared lock on it (flock), which the kernel takes back when the process ends, however it ends, and
# which holds between the containers of one machine. Two runs with one LAB_RUN_ID both find no folder before they
# join; one of them writes its token here, under an exclusive lock, and the other is refused before it has touched
# anything. A run that goes on (LAB_RESUME=auto) takes the folder over, once no rank of the attempt before holds it
# any more.

FILE = ".run"
GONE_S = 10.0  # ranks of a broken attempt end within 5 s of each other
PATIENCE_S = 2.0  # for a lock that somebody holds for two calls of the kernel
TOKEN_BYTES = 256
MOST_BYTES = 1 << 20  # of the file, whose lock is looked at and not its words


class FolderInUse(Exception):
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
            raise FolderInUse(f"another run writes to {folder}")
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


# runs/latest, the link to the newest run: put in place in one step, whatever an earlier process left beside it.

LATEST = "latest"
STALE_S = 60.0  # a draft lives for two calls of the kernel


def point_latest(folder: Path) -> None:
    """Make `latest` beside `folder` a link to it; two runs that end at once leave one of the two, never none.

    A draft has a name of its own: containers number their processes alike, and one that was killed leaves its draft.
    """
    runs = folder.parent
    for draft in runs.glob(f".{LATEST}.*"):
        with suppress(OSError):  # another run's, which is done with it
            if time.time() - draft.lstat().st_mtime > STALE_S:
                draft.unlink()
    draft = runs / f".{LATEST}.{secrets.token_hex(8)}"
    draft.symlink_to(folder.name)
    try:
        draft.replace(runs / LATEST)
    finally:
        draft.unlink(missing_ok=True)


# The runs in a folder: which there are, when each last wrote, its bytes on the disk, and which may be going on.
#
# A run is a folder with records or a verdict in it, or one that a run has claimed; a link to a run elsewhere is none.

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


# `run.json` as a page of a run that goes on reads it: the fields that it needs, each as it has to be.

RUN_FILE = "run.json"
MOST_RUN_BYTES = 64 << 20  # a few hundred bytes a check and a rank


class Claim(TypedDict):
    """A check or a comparison."""

    variant: str
    name: str
    passed: bool


class Gone(TypedDict):
    """A rank that was lost, or left."""

    rank: int
    step: int | None
    reason: str


class Error(TypedDict):
    """What ended a rank."""

    error: str


class Variant(TypedDict):
    """What was measured of one; here its name alone is needed."""

    name: str


class Needed(TypedDict):
    """The fields that a headline needs."""

    run_mode: str
    world_size: WorldSize
    verdict: Literal["pass", "fail", "lost", "refused"]
    proven: bool
    variants: list[Variant]
    lost: list[Gone]
    errors: list[Error]
    checks: list[Claim]
    comparisons: list[Claim]


def read_judged(folder: Path) -> Run:
    """The verdict in the folder of a run; raises BrokenRecord with the reason, and FileNotFoundError where there is
    none."""
    try:
        run: Run = from_json(read_regular(folder / RUN_FILE, MOST_RUN_BYTES))
        msgspec.convert(run, Needed)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BrokenRecord(str(error.strerror)) from None
    except (ValueError, msgspec.ValidationError) as error:
        raise BrokenRecord(f"it is no verdict of the lab ({error})") from None
    return run
