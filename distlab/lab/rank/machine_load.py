"""Read the load of this rank's cores at the start and end of a run: it shows how reliable measured times are.

Linux reports it in /proc; values that a system does not report are None.
"""

import os
import socket
import time
from pathlib import Path
from typing import Literal

from distlab.lab.report.records import Load

PROC = Path("/proc")


def read_load(moment: Literal["start", "end"], proc: Path = PROC) -> Load:
    """Return the load of this machine now."""
    average, runnable = load_average(proc)
    machine = text_of(proc / "sys/kernel/random/boot_id").strip() or socket.gethostname()
    return Load(moment, machine, num_cores(), processor_model(proc), average, runnable, cpu_pressure(proc), time.time())


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_model(proc: Path) -> str:
    """Return the first processor's name; empty if the system does not report it."""
    for line in text_of(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def load_average(proc: Path) -> tuple[float | None, int | None]:
    """Return the load of the last minute, and the machine's threads that run or could, without this one."""
    words = text_of(proc / "loadavg").split()
    try:
        return float(words[0]), max(0, int(words[3].split("/")[0]) - 1)
    except (IndexError, ValueError):
        return None, None


def cpu_pressure(proc: Path) -> float | None:
    """Return the share of the last ten seconds in which some thread waited for a core."""
    for word in text_of(proc / "pressure" / "cpu").partition("\n")[0].split():
        if word.startswith("avg10="):
            return float(word.removeprefix("avg10=")) / 100
    return None


def text_of(path: Path) -> str:
    """Return the text of a file, empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
