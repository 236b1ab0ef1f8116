"""How near a container is to its memory limit: the last figure before a silence tells an OOM kill from a lost link.

The page cache that the kernel would give back first is not counted, as `docker stats` does not count it.
"""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 50  # v1 writes a number near 2^63 where there is no limit


class MemoryPressure:
    """The share of the memory limit in use, for cgroup v2 and v1; `share()` is None without a limit."""

    def __init__(self, cgroup: Path = CGROUP) -> None:
        v1 = cgroup / "memory"
        if (cgroup / "memory.max").exists():
            self._usage, self._stat, self._cache = cgroup / "memory.current", cgroup / "memory.stat", "inactive_file"
            limit = cgroup / "memory.max"
        else:
            self._usage, self._stat, self._cache = (
                v1 / "memory.usage_in_bytes",
                v1 / "memory.stat",
                "total_inactive_file",
            )
            limit = v1 / "memory.limit_in_bytes"
        self.limit_bytes = self._limit(limit)

    @staticmethod
    def _limit(path: Path) -> int | None:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no cgroup, or the word "max"
            return None
        return limit if limit < UNLIMITED_BYTES else None

    def share(self) -> float | None:
        """Used bytes over the limit, from 0 to 1."""
        if self.limit_bytes is None:
            return None
        try:
            used = int(self._usage.read_text())
            cached = (line.split() for line in self._stat.read_text().splitlines())
            used -= next((int(value) for name, value in cached if name == self._cache), 0)
        except (OSError, ValueError):
            return None
        return round(used / self.limit_bytes, 3)
