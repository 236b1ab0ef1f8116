"""A rank that is killed or stopped from outside is lost: the others name it within 5 s and exit with 3."""

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


class Action(threading.Thread):
    """Kills or stops the script's process of rank 1, or its supervisor, once all ranks have started."""

    def __init__(self, folder: Path, action: Callable[[int], None]) -> None:
        super().__init__(daemon=True)
        self._folder, self._action = folder, action
        self.done_at = 0.0
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not (self._folder / "pid1").exists():
            time.sleep(0.1)
        time.sleep(1.0)
        self.done_at = time.monotonic()
        self._action(int((self._folder / "pid1").read_text()))


def kill_script(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop_script(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill_supervisor(pid: int) -> None:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(fields[1]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (kill_script, "was killed by SIGKILL, its last call was all_reduce"),
        (stop_script, "its process was stopped (SIGSTOP), its last call was"),
        (kill_supervisor, "was killed by SIGKILL"),
    ],
)
def test_a_lost_rank_is_named(action: Callable[[int], None], sentence: str, tmp_path: Path) -> None:
    done = Action(tmp_path, action)
    checked = check(SCRIPTS / "long.py", 2, tmp_path, str(tmp_path))
    took_s = time.monotonic() - done.done_at
    assert checked.code in (3, 137), checked.output  # 137: what the launcher reports for a killed rank
    assert sentence in checked.one_line
    assert "rank 1" in checked.output
    assert checked.run["verdict"] == "lost"
    assert [lost["rank"] for lost in checked.run["lost"]] == [1]
    assert took_s < NAMED_WITHIN_S + 3.0  # with the drawing of its report
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)  # no process is left over
