"""What came and was not believed: counted by what was wrong with it and by where it came from, and said a few times.

Anybody may send to a port. So a line is said once for each fault, MAX_LINES at most, and sources are counted one by one
up to MAX_SOURCES: what is sent can fill neither a log nor the memory.
"""

import threading
from collections import Counter
from collections.abc import Callable

MAX_LINES = 6
MAX_SOURCES = 16
OTHERS = "others"
ADVICE = {
    "sealed with another key": "is LAB_KEY the same on all ranks, or does another run use this port?",
    "of another run": "does another run use this port?",
    "not as its kind is written": "is it of another version of the code?",
    "of an unknown kind": "is it of another version of the code?",
}


class Dropped:
    """The count of one process; safe to use from several threads."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.by_fault: Counter[str] = Counter()
        self.by_source: Counter[str] = Counter()
        self.last_source: dict[str, str] = {}  # by fault: the address
        self._say, self._lines = say, 0
        self._lock = threading.Lock()

    def add(self, fault: str, source: tuple[str, int], what: str = "a message") -> None:
        """Count one message from `source`, an address and a port, and say so if its fault is a new one."""
        with self._lock:
            self.by_fault[fault] += 1
            self.last_source[fault] = source[0]
            known = source[0] in self.by_source or len(self.by_source) < MAX_SOURCES
            self.by_source[source[0] if known else OTHERS] += 1
            says = self.by_fault[fault] == 1 and self._lines < MAX_LINES
            self._lines += says
        if says:
            advice = f": {ADVICE[fault]}" if fault in ADVICE else ""
            self._say(f"dropped    {what} {fault}, from {source[0]} port {source[1]}{advice}; more are only counted")

    @property
    def total(self) -> int:
        return sum(self.by_fault.values())
