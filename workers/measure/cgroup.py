"""What the kernel counts for this container: memory used and its limit, for cgroup v2 and v1.

The page cache that the kernel would give back first is not counted, as `docker stats` does not count it.
"""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 50  # v1 writes a number near 2^63 where there is no limit


class ContainerMemory:
    """`used_bytes()` of this container, `limit_bytes` and their `share()`; None where there is no such thing."""

    def __init__(self, cgroup: Path = CGROUP) -> None:
        v1 = cgroup / "memory"
        self._is_v1 = not (cgroup / "memory.max").exists()
        if self._is_v1:
            usage, limit = v1 / "memory.usage_in_bytes", v1 / "memory.limit_in_bytes"
        else:
            usage, limit = cgroup / "memory.current", cgroup / "memory.max"
        self._usage, self._stat = usage, usage.with_name("memory.stat")
        self.limit_bytes = self._limit(limit)

    @staticmethod
    def _limit(path: Path) -> int | None:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no cgroup, or the word "max"
            return None
        return limit if limit < UNLIMITED_BYTES else None

    def used_bytes(self) -> int | None:
        """Bytes in use by all processes of the container; in v1 only under a limit: else it may be the whole
        machine."""
        return self._used_without("inactive_file")

    def kept_bytes(self) -> int | None:
        """The same without any page cache: what the kernel cannot take back when the limit is near."""
        return self._used_without("inactive_file", "active_file")

    def _used_without(self, *caches: str) -> int | None:
        if self._is_v1 and self.limit_bytes is None:
            return None
        try:
            used = int(self._usage.read_text())
            stat = dict(line.split() for line in self._stat.read_text().splitlines())
            return used - sum(int(stat.get(f"total_{name}" if self._is_v1 else name, 0)) for name in caches)
        except (OSError, ValueError):
            return None

    def share(self) -> float | None:
        """Used bytes over the limit, from 0 to 1."""
        used = self.used_bytes() if self.limit_bytes is not None else None
        return None if used is None or self.limit_bytes is None else round(used / self.limit_bytes, 3)
