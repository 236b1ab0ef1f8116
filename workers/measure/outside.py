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

from workers.measure.cgroup import ContainerMemory

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
