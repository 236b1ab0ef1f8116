"""Files of a run: the log and the records of each rank, and one `run.json` for all.

A run that is refused before its ranks have joined leaves nothing, so earlier lines wait in memory until `open` gets the
folder. Every line is one write: a killed rank's lines can be read, and none is cut. A run that is resumed in its own
folder has one log, but separate records for each attempt; only the last ones are judged.
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
from distlab.lab.report.standard_streams import OUTPUT_FAILED, printed
from distlab.lab.report.table import log_line
from distlab.lab.report.terminal import Screen
from distlab.lab.report.verdict import as_lines


class Unwritable(Exception):
    """The folder of the run cannot be written any more: the sentence to end with, exit code 1."""


Level = Literal["quiet", "normal", "full"]  # how much a log has: LAB_LOG
LEVELS: tuple[Level, ...] = get_args(Level)


class Journal:
    """The log and the records of one rank; safe to use from the main thread and from the watch."""

    def __init__(self, level: Level = "full") -> None:
        self.level = level
        self.screen = Screen(sys.stdout)
        self.records: list[Record] = []
        # The log's text of a record, and the printed one.
        self.lines_of: Callable[[Record], list[str]] = lambda record: []  # noqa: ARG005
        self.shown_of: Callable[[Record], list[str]] = lambda record: []  # noqa: ARG005
        self.folder: Path | None = None
        self._pending: list[str] = []
        self._log = self._lines = -1  # file descriptors, once there is a folder
        self._lock = threading.RLock()

    def open(self, folder: Path, rank: int) -> None:
        """Create `rank<r>.jsonl` in `folder`, and create or continue `rank<r>.log`; raises OSError if they cannot be
        written."""
        with self._lock:
            folder.mkdir(parents=True, exist_ok=True)
            before = put_aside(folder, [rank])
            if before:
                self._pending.insert(0, log_line("again", f"attempt {before + 1} of this run"))
            self._log, self._lines = (_create(folder / f"rank{rank}.{kind}") for kind in ("log", "jsonl"))
            for text in self._pending:
                _append(self._log, text)
            self.folder = folder

    def begin(self, folder: Path, rank: int, start: Callable[[], Record]) -> None:
        """Open the folder and write the first record, unless that was done: the main thread and the watch may both do
        it."""
        with self._lock:
            if self.folder is None:
                self.open(folder, rank)
                self.write(start())

    @property
    def open_files(self) -> list[int]:
        """Return the descriptors of its two files, once there is a folder."""
        return [] if self.folder is None else [self._log, self._lines]

    def say(self, text: str, at: Level = "quiet", *, kept: bool = True) -> None:
        """Print `text`, and write it to the log, if LAB_LOG is `at` or higher; if printing has failed before, only to
        the log. A line that is not `kept` is on a terminal only until the next line."""
        if LEVELS.index(self.level) < LEVELS.index(at):
            return
        with self._lock:
            why = printed(self.screen.shown(text), end="")  # first, since a full disk may fail the log
            if kept:
                self._keep(text)
            if why:
                self._keep(OUTPUT_FAILED.format(why))

    def keep(self, text: str) -> None:
        """Write a line to the log only."""
        with self._lock:
            self._keep(text)

    def output_failed(self, why: str) -> None:
        """Write to the log that output cannot be printed any more, and why."""
        with self._lock:
            self._keep(OUTPUT_FAILED.format(why))

    def _keep(self, text: str) -> None:
        if self.folder is None:
            self._pending.append(text)
        else:
            _append(self._log, text)

    def write(self, record: Record) -> None:
        """Keep `record` in memory and as a line of the file, and print its text."""
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
    """Rename the records of an earlier attempt of these ranks, so that they are not taken for this one's; return their
    number."""
    attempts = 0
    for rank in ranks:
        path = folder / f"rank{rank}.jsonl"
        attempts = len(list(folder.glob(f"rank{rank}.attempt*.jsonl")))
        if path.exists():
            attempts += 1
            path.rename(folder / f"rank{rank}.attempt{attempts}.jsonl")
    return attempts


def ranks_beyond(folder: Path, world_size: int) -> list[int]:
    """Return the ranks of an earlier, larger attempt that left records in `folder`."""
    names = [path.stem.removeprefix("rank") for path in folder.glob("rank*.jsonl")]
    return sorted(int(name) for name in names if name.isdecimal() and int(name) >= world_size)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _append(file: int, line: str) -> None:
    """Write a line at once: a kill comes before or after it, and a part written to a full disk is removed."""
    data, before = f"{line}\n".encode(errors="backslashreplace"), os.fstat(file).st_size
    try:
        if os.write(file, data) < len(data):
            os.ftruncate(file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the next write's error
    except OSError as error:
        raise Unwritable(
            f"the run cannot be written any more ({error.strerror}): free space, or set LAB_RUNS_DIR"
        ) from error


# A folder has one run: the first to claim `runs/<run_id>` has it until the last of its ranks has gone.
#
# The file `.run` in it has the run's token, equal on all of its ranks and different in every other run. A rank has a
# shared lock on it (flock), which the kernel releases when the process ends, and which works between containers of one
# machine. Two runs with one LAB_RUN_ID both find no folder before they join; one of them writes its token here, under
# an exclusive lock, and the other is refused before it has written anything. A resumed run (LAB_RESUME=auto) takes over
# the folder once no rank of the earlier attempt has the lock.


FILE = ".run"
ENDED_WITHIN_S = 10.0  # ranks of a broken attempt end within 5 s of each other
PATIENCE_S = 2.0  # for a lock that is needed for two system calls
TOKEN_BYTES = 256
MOST_BYTES = 1 << 20  # of the file; its lock matters, not its content


class FolderInUse(Exception):
    """Another run has the folder."""


def claim(folder: Path, token: str, *, goes_on: bool) -> int:
    """Create `folder` if necessary and claim it for the run of this token; return a descriptor that must stay open.

    Raises FolderInUse if another run has it, OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + (ENDED_WITHIN_S if goes_on else PATIENCE_S)
    while True:
        owner = os.pread(file, TOKEN_BYTES, 0) if locked(file, fcntl.LOCK_SH) else None
        if owner == token.encode():
            return file
        if (owner and not goes_on) or time.monotonic() > deadline:
            os.close(file)
            raise FolderInUse(f"another run writes to {folder}")
        # Unused, or an earlier attempt's: the first to find no other rank there takes it.
        if owner is not None and locked(file, fcntl.LOCK_EX) and os.pread(file, TOKEN_BYTES, 0) == owner:
            os.ftruncate(file, 0)
            os.pwrite(file, token.encode(), 0)
        else:
            locked(file, fcntl.LOCK_UN)
            time.sleep(random.uniform(0.005, 0.05))  # random, so that two waiting ranks do not stay in step


def has_claimed(folder: Path, token: str) -> bool:
    """Return whether the run of this token has the folder."""
    try:
        return (folder / FILE).read_bytes() == token.encode()
    except OSError:
        return False


def is_running(folder: Path) -> bool:
    """Return whether a rank of the run in this folder is alive, as far as this machine's kernel knows."""
    try:
        with regular(folder / FILE, MOST_BYTES) as file:
            return not locked(file.fileno(), fcntl.LOCK_EX)
    except OSError:
        return False


def locked(file: int, how: int) -> bool:
    """Try to lock the open file; return whether that worked at once."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: as if none existed
        return True
    return True


# runs/latest, the link to the newest run: replaced atomically, whatever an earlier process left there.

LATEST = "latest"
STALE_S = 60.0  # a draft exists for two system calls


def point_latest(folder: Path) -> None:
    """Make `latest` next to `folder` a link to it; two runs that end at once leave one of the two, never none.

    Drafts have random names: containers use equal process numbers, and a killed process leaves its draft.
    """
    runs = folder.parent
    for draft in runs.glob(f".{LATEST}.*"):
        with suppress(OSError):  # another run has removed it
            if time.time() - draft.lstat().st_mtime > STALE_S:
                draft.unlink()
    draft = runs / f".{LATEST}.{secrets.token_hex(8)}"
    draft.symlink_to(folder.name)
    try:
        draft.replace(runs / LATEST)
    finally:
        draft.unlink(missing_ok=True)


# `run.json` is written once per attempt of a run, by the first rank to do it.
#
# A rank that was paused while writing and declared dead may wake at any line. So an attempt's outcome is claimed by a
# hard link, which the file system creates for one rank only, with all of its content; `run.json` then shows the claimed
# one. Rank 0 writes verdict and report before the ranks agree on them: should it die after that, another rank that
# shares the disk publishes them.


class Unpublished(Exception):
    """The agreed outcome could not be published: the sentence to end with."""


class Outcome:
    """The outcome of one attempt of the run in `folder`; `token` is equal on all of its ranks, and unique.

    Prepared files have their rank's number: a rank that was declared dead and wakes shares no file with the others.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self._token = token
        self._prepared: str | None = None  # the file prepared by this rank
        self._claim = folder / f".run.{token}.json"

    def page(self, rank: int) -> Path:
        """Return where `rank` draws its report until the ranks have agreed."""
        return self.folder / f".report.{self._token}.{rank}.html"

    def claimed(self) -> bool:
        """Return whether a rank that shares this disk has published it."""
        return self._claim.exists()

    def prepare(self, run: Run, rank: int) -> None:
        """Write the file that `publish` of the same rank will use."""
        self._prepared = "".join(as_lines(run))
        write_atomically(self._ready(rank), [self._prepared])

    def publish(self, rank: int) -> None:
        """Publish the file that `rank` prepared, once: a second call changes nothing.

        Raises Unpublished if it is missing, or another outcome came first.
        """
        try:
            prepared = self._ready(rank).read_text(encoding="utf-8")
        except FileNotFoundError:
            if not self.claimed():
                raise Unpublished(
                    f"the verdict of rank {rank} is not in {self.folder}: run.json was not written"
                ) from None
            if self._prepared is None:
                return  # by another call
            prepared = self._prepared  # another survivor has published it, or removed it for another outcome
        self._claim_with(self._ready(rank))
        if self._claim.read_text(encoding="utf-8") != prepared:
            raise Unpublished(f"{self.folder / 'run.json'} has another verdict than that of rank {rank}")
        with suppress(FileNotFoundError):  # if it could not be drawn, or another call has moved it
            os.replace(self.page(rank), self.folder / "report.html")
        self._ready(rank).unlink(missing_ok=True)

    def write(self, run: Run) -> bool:
        """Make `run` the outcome; return False if there is one already."""
        draft = self.folder / f".{secrets.token_hex(8)}.json"  # two containers may have equal process numbers
        write_atomically(draft, as_lines(run))
        mine = self._claim_with(draft)
        draft.unlink(missing_ok=True)
        return mine

    def discard(self) -> None:
        """Remove all prepared files: called by the rank whose `write` became the outcome instead."""
        for kind in ("ready", "report"):
            for path in self.folder.glob(f".{kind}.{self._token}.*"):
                with suppress(OSError):
                    path.unlink()

    def _ready(self, rank: int) -> Path:
        return self.folder / f".ready.{self._token}.{rank}.json"

    def _claim_with(self, draft: Path) -> bool:
        """Claim the attempt with `draft`, whose file stays; return False if it is claimed already. In both cases
        `run.json` then shows the claim, even if the claiming rank died in between."""
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
