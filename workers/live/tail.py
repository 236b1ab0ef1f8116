"""The records of one rank as they are written: only what is new is read, and only those that a live page needs."""

import os
from pathlib import Path

from workers.report.lines import MOST_BYTES, BrokenRecord, from_line
from workers.report.records import End, Failed, Left, Losses, Lost, Record
from workers.report.regular import regular

KINDS = (Lost, Left, Failed, Losses, End)
WANTED = tuple(f'{{"record": "{kind.__name__.lower()}"'.encode() for kind in KINDS)  # as lines.to_line begins


class Tail:
    """`rank<r>.jsonl` up to its last whole line; another attempt of the run begins the file, and this, anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Record] = []
        self.faults: list[str] = []  # a sentence for each line that is none
        self._file, self._read = 0, 0  # inode, and bytes of whole lines read

    def read(self) -> list[Record]:
        """All records of these kinds until now; none of a file that is not there. Raises OSError."""
        if not self.path.exists():
            return []
        with regular(self.path, MOST_BYTES) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._read:
                self.found, self.faults, self._file, self._read = [], [], status.st_ino, 0
            file.seek(self._read)
            whole, newline, _ = file.read(MOST_BYTES).rpartition(b"\n")
        self._read += len(whole + newline)
        for line in whole.splitlines():
            if line.startswith(WANTED):
                self._take(line)
        return self.found

    def _take(self, line: bytes) -> None:
        try:
            self.found.append(from_line(line, f"a line of {self.path.name}"))
        except BrokenRecord as error:
            self.faults.append(str(error))
