"""Which run is shown: the one that was named, or of a folder of runs the newest, and after it the next.

Of a folder of runs the shown one is kept until it is over, so that two that go on side by side do not alternate.
"""

import time
from contextlib import suppress
from pathlib import Path

from workers.config import ConfigError
from workers.live.state import Reader, Snapshot, clock_s
from workers.report import live
from workers.report.lines import BrokenRecord

LOOK_S = 1.0  # between two looks for a newer run
APART_S = 5.0  # containers that are started together begin so much earlier or later


class Runs:
    """Snapshots of the run in `folder`, or of the newest in a folder of runs; `new`: of those that begin from now on.

    Raises ConfigError where there is no such folder, or that of a run which shows nothing.
    """

    def __init__(self, folder: Path, *, new: bool = False) -> None:
        if not folder.is_dir() and not new:  # the first run makes it
            raise ConfigError([f"{str(folder)!r} is not a folder: name that of a run, such as runs/latest, or runs/"])
        self._folder = folder.resolve()
        self._since = time.time() - APART_S if new else 0.0
        self._reader: Reader | None = None
        self._shown = Snapshot(0.0)
        self._looked_at = -LOOK_S
        if is_run(self._folder):
            if not live.places(self._folder):
                raise ConfigError([f"{str(folder)!r} shows nothing: its ranks ran without LAB_LIVE=1"])
            self._reader, self._looked_at = Reader(self._folder), float("inf")

    def snapshot(self) -> Snapshot:
        """What is to be shown now."""
        now = clock_s()
        if now - self._looked_at >= LOOK_S and self._shown.verdict != "running":
            self._looked_at = now
            newest = self._newest()
            if newest is not None and (self._reader is None or self._reader.folder != newest):
                self._reader = Reader(newest)
        self._shown = self._reader.snapshot(now) if self._reader is not None else Snapshot(now)
        return self._shown

    def _newest(self) -> Path | None:
        """The run that was written to last, of those that show themselves and began late enough."""
        written: list[tuple[float, Path]] = []
        for folder in self._folder.iterdir() if self._folder.is_dir() else []:
            if not folder.is_symlink():  # runs/latest
                for path in live.places(folder).values():
                    with suppress(OSError):
                        written.append((path.stat().st_mtime, path))
        for written_at, path in sorted(written, reverse=True):
            with suppress(BrokenRecord):
                if written_at >= self._since and live.read(path).began_at >= self._since:
                    return path.parent
        return None


def is_run(folder: Path) -> bool:
    """Whether it is the folder of one run, and not of all runs."""
    return (folder / ".run").exists() or any(folder.glob("rank*.jsonl")) or bool(live.places(folder))
