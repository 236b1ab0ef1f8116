"""Two mistakes with processes, contained: a program without the `__main__` guard, and a child that nobody waits for.

Each program runs in a folder of its own and in a process group of its own, which is killed after at most LIMIT_S
seconds. A program that starts itself again and again counts its processes in that folder, and none goes on once there
are MOST of them: the fork bomb is seen, and the machine is not.
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
sys.stdout.reconfigure(line_buffering=True)
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
ZOMBIE = """\
import multiprocessing, os

def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0]
    except OSError:
        return "gone"

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=os.getpid)
    worker.start()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not waited for yet
    print("before join:", state(worker.pid))
    worker.join()
    print("after join:", state(worker.pid))
"""
STATES = {"Z": "a zombie (state Z): ended, and still in the table of processes", "gone": "gone from that table"}


def fork_bomb() -> Iterator[str]:
    """Three programs that mean to start two workers: how many processes each started, and how many workers worked."""
    yield f"A program starts {WORKERS} workers, each a fresh interpreter that imports the program again (spawn)."
    yield ""
    for name, program in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as folder:
            started, worked, errors = contained(program, Path(folder))
        stopped = f", stopped by the limit of {MOST}" if started > MOST else ""
        yield f"{name}: {min(started, MOST)} processes{stopped}, {worked} of {WORKERS} workers did their work"
        if refused := errors.count("RuntimeError: "):
            yield f"    {refused} of them ended with RuntimeError: An attempt has been made to start a new process"
            yield "    before the current process has finished its bootstrapping phase"
    yield ""
    yield 'Each child runs the lines that start workers, too, unless they stand below `if __name__ == "__main__":`.'
    yield "Python refuses that today, so nothing explodes, and no work is done either. The last program is what the"
    yield f"refusal prevents: {WORKERS} interpreters that run the file from the top, each with {WORKERS} more."


def zombie() -> Iterator[str]:
    """A child that has ended, before and after it is joined."""
    with tempfile.TemporaryDirectory() as folder:
        said, _ = ended(ZOMBIE, Path(folder))
    for line in said.splitlines():
        when, _, state = line.partition(": ")
        yield f"{when}: {STATES.get(state, f'state {state}')}"
    yield ""
    yield "The kernel keeps a child's exit code until its parent asks for it: `join` asks. A parent that never does"
    yield "leaves a row in the table of processes for each child until it ends itself."


def contained(program: str, folder: Path) -> tuple[int, int, str]:
    """How many processes a program started, itself among them, how many workers worked, and what went to stderr."""
    for name in ("started", "worked"):
        (folder / name).mkdir()
    _, errors = ended(program, folder)
    return *(len(list((folder / name).iterdir())) for name in ("started", "worked")), errors  # type: ignore[return-value]


def ended(program: str, folder: Path) -> tuple[str, str]:
    """What a program prints, on stdout and on stderr; it and all that it started have ended then."""
    (folder / "program").write_text(program)
    process = subprocess.Popen(
        [sys.executable, "program"], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "", f"it was ended after {LIMIT_S:g} s"
    finally:
        end_group(process)


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
