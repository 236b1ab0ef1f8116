"""What a program without the `__main__` guard starts: a fork bomb, contained.

    python docs/examples/fork_bomb.py

Each program runs in a folder and in a process group of its own, which is killed after at most LIMIT_S seconds. It
counts its processes in that folder, and none goes on once there are MOST of them: the fork bomb is seen, and the
machine does not feel it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LIMIT_S = 60.0
KILLED_S = 10.0  # until all that was killed has ended
MOST = 15  # processes: 1 + 2 + 4 + 8
WORKERS = 2

COUNTED = f"""\
import os, sys
number = len(os.listdir("started"))
open(f"started/{{os.getpid()}}", "w").close()
if number >= {MOST}:
    os._exit(0)  # what contains it: without these lines it would go on
"""
WORK = """\
import multiprocessing

def work(worker):
    open(f"worked/{os.getpid()}", "w").close()

"""
START = f"""\
context = multiprocessing.get_context("spawn")
workers = [context.Process(target=work, args=(number,)) for number in range({WORKERS})]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
"""
GUARDED = 'if __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in START.splitlines())
# What spawn comes to where nobody refuses it: a fresh interpreter runs the file from the top.
PLAIN = f"""\
import subprocess
workers = [subprocess.Popen([sys.executable, __file__]) for _ in range({WORKERS})]
for worker in workers:
    worker.wait()
"""
PROGRAMS = {
    "with the guard": COUNTED + WORK + GUARDED,
    "without it": COUNTED + WORK + START,
    "without it, and without Python's own check": COUNTED + PLAIN,
}


def shown() -> Iterator[str]:
    """Three programs that mean to start two workers: how many processes each started, and how many workers worked."""
    for name, program in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as folder:
            started, worked, errors = contained(program, Path(folder))
        stopped = f", stopped by the limit of {MOST}" if started > MOST else ""
        yield f"{name}: {min(started, MOST)} processes{stopped}, {worked} of {WORKERS} workers did their work"
        if refused := errors.count("RuntimeError: "):
            yield f"    {refused} of them ended with RuntimeError: An attempt has been made to start a new process"
            yield "    before the current process has finished its bootstrapping phase"


def contained(program: str, folder: Path) -> tuple[int, int, str]:
    """How many processes a program started, itself among them, how many workers worked, and what went to stderr; all
    of them have ended then."""
    (folder / "program").write_text(program)
    started, worked = folder / "started", folder / "worked"
    started.mkdir()
    worked.mkdir()
    process = subprocess.Popen(
        [sys.executable, "program"], cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        errors = process.communicate(timeout=LIMIT_S)[1]
    except subprocess.TimeoutExpired:
        errors = f"it was ended after {LIMIT_S:g} s"
    finally:
        end_group(process)
    return len(list(started.iterdir())), len(list(worked.iterdir())), errors


def end_group(process: "subprocess.Popen[str]") -> None:
    """Kill whatever is left of a program's process group, and wait until all of it has ended: a process that is killed
    ends when the kernel comes to it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=KILLED_S)
    until_s = time.monotonic() + KILLED_S
    while runs(process.pid):
        if time.monotonic() > until_s:
            raise TimeoutError(f"processes of group {process.pid} run {KILLED_S:g} s after they were killed")
        time.sleep(0.01)


def runs(group: int) -> bool:
    """Whether a process of this group has not ended; a zombie has."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


if __name__ == "__main__":
    for line in shown():
        print(line, flush=True)
