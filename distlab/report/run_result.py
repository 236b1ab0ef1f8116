"""`run.json` is written once for each attempt of a run, by whoever comes first, and by nobody after that.

A rank that was paused while it wrote and declared dead meanwhile may wake at any line. So what became of an attempt is
claimed by a hard link, which the file system makes for one rank alone, with all of its content; `run.json` then only
shows what was claimed. Rank 0 lays its verdict and report ready before the ranks agree on them: should it die after
that, another rank that shares the disk puts them in place.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from distlab.report.reading import write_atomically
from distlab.report.records import Run
from distlab.report.run_folder import point_latest
from distlab.report.verdict import as_lines


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
