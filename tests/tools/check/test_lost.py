"""A rank that is killed or stopped from outside is lost: it is named within 5 s, by what is left, and the code is 3."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.check.cases import SCRIPTS, check

NAMED_WITHIN_S = 5.0
START_S = 60.0


class Deed(threading.Thread):
    """Does something to the script's process of rank 1, or to its doctor, once all ranks are there."""

    def __init__(self, folder: Path, deed: Callable[[int], None]) -> None:
        super().__init__(daemon=True)
        self._folder, self._deed = folder, deed
        self.done_at = 0.0
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not (self._folder / "pid1").exists():
            time.sleep(0.1)
        time.sleep(1.0)
        self.done_at = time.monotonic()
        self._deed(int((self._folder / "pid1").read_text()))


def kill_script(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop_script(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill_doctor(pid: int) -> None:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(fields[1]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (kill_script, "was killed by SIGKILL, its last call was all_reduce"),
        (stop_script, "its process was stopped (SIGSTOP), its last call was"),
        (kill_doctor, "was killed by SIGKILL"),
    ],
)
def test_it_is_named(deed: Callable[[int], None], said: str, tmp_path: Path) -> None:
    done = Deed(tmp_path, deed)
    checked = check(SCRIPTS / "long.py", 2, tmp_path, str(tmp_path))
    took_s = time.monotonic() - done.done_at
    assert checked.code in (3, 137), checked.said  # 137: the launcher's word for a rank that was killed itself
    assert said in checked.told
    assert "rank 1" in checked.said
    assert checked.run["verdict"] == "lost"
    assert [lost["rank"] for lost in checked.run["lost"]] == [1]
    assert took_s < NAMED_WITHIN_S + 3.0  # its report is drawn, too
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)  # no process is left over
