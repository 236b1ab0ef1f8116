"""What a rank leaves behind while it runs: its log and its records, in the folder of the run.

A run that is refused before its ranks have joined leaves nothing, so lines that are said earlier wait in memory until
`open` names the folder. Every line is written out at once and whole: what a killed rank had said can be read.
"""

import threading
from pathlib import Path
from typing import IO

from workers.report.records import Record, to_line


class Journal:
    """The log and the records of one rank; safe to use from the main thread and from the watch."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.folder: Path | None = None
        self._said: list[str] = []
        self._log: IO[str] | None = None
        self._lines: IO[str] | None = None
        self._lock = threading.RLock()

    def open(self, folder: Path, rank: int) -> None:
        """Begin `rank<r>.log` and `rank<r>.jsonl` in `folder`; raises OSError where it cannot be written."""
        with self._lock:
            folder.mkdir(parents=True, exist_ok=True)
            self._log = (folder / f"rank{rank}.log").open("w", encoding="utf-8", buffering=1)
            self._lines = (folder / f"rank{rank}.jsonl").open("w", encoding="utf-8", buffering=1)
            self._log.writelines(line + "\n" for line in self._said)
            self.folder = folder

    def say(self, text: str) -> None:
        """Print `text`, and keep it in the log."""
        with self._lock:
            print(text, flush=True)
            if self._log is None:
                self._said.append(text)
            else:
                self._log.write(text + "\n")

    def write(self, record: Record) -> None:
        """Keep `record`, in memory and as a line of the file."""
        with self._lock:
            self.records.append(record)
            if self._lines is not None:
                self._lines.write(to_line(record) + "\n")
