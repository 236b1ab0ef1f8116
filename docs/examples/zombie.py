"""A child that has ended, before and after it is joined: `python docs/examples/zombie.py`."""

import multiprocessing
import os
from pathlib import Path

STATES = {"Z": "a zombie (state Z): ended, and still in the table of processes", "": "gone from that table"}


def state(pid: int) -> str:
    """The kernel's letter for a process (proc(5)); empty where it has none of this number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=os.getpid)
    worker.start()
    assert worker.pid is not None
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its exit code is not asked for yet
    print("before join:", STATES[state(worker.pid)])
    worker.join()  # asks for it
    print("after join:", STATES[state(worker.pid)])
