"""What ranks leave in the folder of a run: each its log and its records, and together one `run.json`.

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
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from distlab.lab.report.reading import regular, to_line, write_atomically
from distlab.lab.report.records import Record, Run
from distlab.lab.report.standard_streams import UNHEARD, printed
from distlab.lab.report.table import log_line
from distlab.lab.report.terminal import Screen
from distlab.lab.report.verdict import as_lines


class Unwritable(Exception):
    """The folder of the run takes no more: the sentence to end with, exit code 1."""


Level = Literal["quiet", "normal", "full"]  # how much a log says: LAB_LOG
LEVELS: tuple[Level, ...] = get_args(Level)


class Journal:
    """The log and the records of one rank; safe to use from the main thread and from the watch."""

    def __init__(self, level: Level = "full") -> None:
        self.level = level
        self.screen = Screen(sys.stdout)
        self.records: list[Record] = []
        # What its log has of a record, and what is printed of it.
        self.lines_of: Callable[[Record], list[str]] = lambda record: []  # noqa: ARG005
        self.shown_of: Callable[[Record], list[str]] = lambda record: []  # noqa: ARG005
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
                self._said.insert(0, log_line("again", f"attempt {before + 1} of this run"))
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

    def say(self, text: str, at: Level = "quiet", *, kept: bool = True) -> None:
        """Print `text`, and keep it in the log, where LAB_LOG is `at` or says more; who prints nothing any more has it
        in the log alone. What is not `kept` is on a terminal only until the next line."""
        if LEVELS.index(self.level) < LEVELS.index(at):
            return
        with self._lock:
            why = printed(self.screen.shown(text), end="")  # first: a disk that is full keeps nothing
            if kept:
                self._keep(text)
            if why:
                self._keep(UNHEARD.format(why))

    def keep(self, text: str) -> None:
        """A line of the log alone, which nobody sees on a terminal."""
        with self._lock:
            self._keep(text)

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
        """Keep `record`, in memory and as a line of the file, and print what is said of it."""
        with self._lock:
            self.records.append(record)
            if self.folder is not None:
                _append(self._lines, to_line(record))
            if self.level == "quiet":
                return
            for line in self.shown_of(record):
                self.say(line, kept=False)
            for line in self.lines_of(record):
                self._keep(line)


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
        owner = os.pread(file, TOKEN_BYTES, 0) if locked(file, fcntl.LOCK_SH) else None
        if owner == token.encode():
            return file
        if (owner and not goes_on) or time.monotonic() > deadline:
            os.close(file)
            raise FolderInUse(f"another run writes to {folder}")
        # Nobody's, or that of an attempt before: it is taken by the one who finds nobody else at it.
        if owner is not None and locked(file, fcntl.LOCK_EX) and os.pread(file, TOKEN_BYTES, 0) == owner:
            os.ftruncate(file, 0)
            os.pwrite(file, token.encode(), 0)
        else:
            locked(file, fcntl.LOCK_UN)
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
            return not locked(file.fileno(), fcntl.LOCK_EX)
    except OSError:
        return False


def locked(file: int, how: int) -> bool:
    """Whether the open file could be locked, at once."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: as if there were none
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


# `run.json` is written once for each attempt of a run, by whoever comes first, and by nobody after that.
#
# A rank that was paused while it wrote and declared dead meanwhile may wake at any line. So what became of an attempt
# is claimed by a hard link, which the file system makes for one rank alone, with all of its content; `run.json` then
# only shows what was claimed. Rank 0 lays its verdict and report ready before the ranks agree on them: should it die
# after that, another rank that shares the disk puts them in place.


class Unpublished(Exception):
    """What all ranks agreed on could not be put in place: the sentence to end with."""


class Outcome:
    """What became of one attempt of the run in `folder`; `token` is the same on all of its ranks, and in no other.

    What is laid ready bears the rank that laid it: one that was declared dead and wakes shares no file with the others.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self._token = token
        self._laid: str | None = None  # by this rank
        self._claim = folder / f".run.{token}.json"

    def page(self, rank: int) -> Path:
        """Where `rank` draws its report until the ranks have agreed."""
        return self.folder / f".report.{self._token}.{rank}.html"

    def claimed(self) -> bool:
        """Whether a rank that shares this disk has written it."""
        return self._claim.exists()

    def lay_ready(self, run: Run, rank: int) -> None:
        """Write what `publish` of the same rank will claim."""
        self._laid = "".join(as_lines(run))
        write_atomically(self._ready(rank), [self._laid])

    def publish(self, rank: int) -> None:
        """Put in place what `rank` laid ready, once: a second call changes nothing.

        Raises Unpublished where it is not there, or another outcome came first.
        """
        try:
            laid = self._ready(rank).read_text(encoding="utf-8")
        except FileNotFoundError:
            if not self.claimed():
                raise Unpublished(
                    f"the verdict of rank {rank} is not in {self.folder}: run.json was not written"
                ) from None
            if self._laid is None:
                return  # by another call
            laid = self._laid  # which another survivor has put in place, or removed for an outcome of its own
        self._take(self._ready(rank))
        if self._claim.read_text(encoding="utf-8") != laid:
            raise Unpublished(f"another verdict than that of rank {rank} stands in {self.folder / 'run.json'}")
        with suppress(FileNotFoundError):  # where it could not be drawn, or another call has moved it
            os.replace(self.page(rank), self.folder / "report.html")
        self._ready(rank).unlink(missing_ok=True)

    def write(self, run: Run) -> bool:
        """Make `run` the outcome; False if there is one already."""
        draft = self.folder / f".{secrets.token_hex(8)}.json"  # processes of two containers have the same numbers
        write_atomically(draft, as_lines(run))
        mine = self._take(draft)
        draft.unlink(missing_ok=True)
        return mine

    def discard(self) -> None:
        """Remove what any rank laid ready: for the one whose `write` has become the outcome in its place."""
        for kind in ("ready", "report"):
            for path in self.folder.glob(f".{kind}.{self._token}.*"):
                with suppress(OSError):
                    path.unlink()

    def _ready(self, rank: int) -> Path:
        return self.folder / f".ready.{self._token}.{rank}.json"

    def _take(self, draft: Path) -> bool:
        """Claim the attempt with `draft`, whose file stays; False where it is claimed. Either way `run.json` shows the
        claim afterwards, though the rank that claimed it had ended in between."""
        mine = True
        try:
            os.link(draft, self._claim)
        except (FileExistsError, FileNotFoundError):
            mine = False
        except OSError:  # a file system without hard links
            mine = not self.claimed()
            if mine:
                write_atomically(self._claim, [draft.read_text(encoding="utf-8")])
        write_atomically(self.folder / "run.json", [self._claim.read_text(encoding="utf-8")])
        point_latest(self.folder)
        return mine
