"""`run.json` is written once for each attempt of a run, by whoever comes first, and by nobody after that.

A rank that was paused while it wrote and given up meanwhile may wake at any line. So what became of an attempt is
claimed by a hard link, which the file system makes for one rank alone, with all of its content; `run.json` then only
shows what was claimed. Rank 0 lays its verdict and report ready before the ranks agree on them: should it die after
that, another rank that shares the disk puts them in place.
"""

import os
from contextlib import suppress
from pathlib import Path

from workers.report.claims import Run
from workers.report.judge import as_lines
from workers.report.latest import point_latest
from workers.report.lines import write_atomically


class Outcome:
    """What became of one attempt of the run in `folder`; `token` is the same on all of its ranks, and in no other."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self._claim = folder / f".run.{token}.json"
        self._ready = folder / f".ready.{token}.json"
        self.page = folder / f".report.{token}.html"  # where rank 0 draws its report until the ranks have agreed

    def claimed(self) -> bool:
        """Whether a rank that shares this disk has written it."""
        return self._claim.exists()

    def lay_ready(self, run: Run) -> None:
        """Write what `publish` will claim."""
        write_atomically(self._ready, as_lines(run))

    def publish(self) -> bool:
        """Put in place what was laid ready; False where there is none, or another outcome came first."""
        mine = self._take(self._ready)
        with suppress(FileNotFoundError):
            if mine:
                os.replace(self.page, self.folder / "report.html")
        return mine

    def write(self, run: Run) -> bool:
        """Make `run` the outcome; False if there is one already."""
        draft = self.folder / f".{os.getpid()}.json"
        write_atomically(draft, as_lines(run))
        mine = self._take(draft)
        draft.unlink(missing_ok=True)
        return mine

    def discard(self) -> None:
        """Remove what was laid ready and never agreed upon."""
        for path in (self._ready, self.page):
            with suppress(OSError):
                path.unlink()

    def _take(self, draft: Path) -> bool:
        try:
            os.link(draft, self._claim)
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError:  # a file system without hard links
            if self.claimed():
                return False
            write_atomically(self._claim, [draft.read_text(encoding="utf-8")])
        self._show()
        draft.unlink(missing_ok=True)
        return True

    def _show(self) -> None:
        """`run.json` as it was claimed, and `latest` on this run."""
        write_atomically(self.folder / "run.json", [self._claim.read_text(encoding="utf-8")])
        point_latest(self.folder)
