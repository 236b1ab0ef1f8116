"""The same memory as others count it: the process's resident pages, the container's, on CUDA the allocator's.

They see more than tensors (code that is touched for the first time, gloo's and Python's buffers) and whole pages, so
what counts is their growth since before the strategy was made. What malloc keeps of freed memory is given back before
each look, where the C library can do that. The peak is the kernel's high-water mark, which starts anew where the kernel
lets us.

How far off they are: a model of 10M parameters with AdamW stands as 163.8 MB of tensors and as 164.2 MB of pages, at
the peak 245.8 and 246.2. In a small run the first variant comes out 2 to 4 MB higher, for the code that nobody had run
before it (76 MB where that is PyTorch's DTensor), and every peak 2 to 10 MB, for what kernels and gloo take beside
tensors. A container that several ranks share counts all of them.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

# What the kernel counts for this container: memory used and its limit, for cgroup v2 and v1.
#
# The page cache that the kernel would give back first is not counted, as `docker stats` does not count it.

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


PROCESS = Path("/proc/self")


class Process:
    """How the process and its container grew: `rest` and `peak` in bytes by source, empty where nobody can tell."""

    most_bytes = None  # since `begin`: only an allocator tells

    def __init__(self, container: ContainerMemory) -> None:
        self.rest: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._container = container
        self._start: dict[str, int] = {}

    def begin(self) -> None:
        """Before the strategy is made."""
        self._start = self._now()

    def begin_step(self) -> None:
        """Forget the peak until now."""
        give_back()
        with suppress(OSError):  # it may be forbidden: the mark then is an older one, and is not shown
            (PROCESS / "clear_refs").write_text("5")
            self.peak = {"process": 0}

    def end_step(self) -> None:
        if self.peak:
            self.peak["process"] = _status_bytes("VmHWM") - self._start["process"]

    def at_rest(self) -> None:
        now = self._now()
        self.rest = {source: now[source] - nbytes for source, nbytes in self._start.items() if source in now}

    def _now(self) -> dict[str, int]:
        give_back()
        used = {"process": _status_bytes("VmRSS")} if PROCESS.exists() else {}
        container = self._container.kept_bytes()
        if container is None or self._container.limit_bytes is None:  # with no limit it may well be the whole machine
            return used
        return used | {"container": container}


class Allocator:
    """The same of CUDA's caching allocator, which rounds up to 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        self.rest: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._device = device
        self._start = self._most_until_step = 0

    @property
    def most_bytes(self) -> int:
        """The allocator's peak since `begin`."""
        return max(self._most_until_step, torch.cuda.max_memory_allocated(self._device))

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)

    def begin_step(self) -> None:
        self._most_until_step = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def end_step(self) -> None:
        self.peak = {"allocator": torch.cuda.max_memory_allocated(self._device) - self._start}

    def at_rest(self) -> None:
        self.rest = {"allocator": torch.cuda.memory_allocated(self._device) - self._start}


def outside(device: torch.device) -> Process | Allocator:
    """Who else counts the memory of this device."""
    return Allocator(device) if device.type == "cuda" else Process(ContainerMemory())


def give_back() -> None:
    """Return freed memory to the kernel (glibc alone can be told to)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(name: str) -> int:
    """A line of the process's status, which the kernel writes in kB."""
    lines = (line.split() for line in (PROCESS / "status").read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == f"{name}:")
