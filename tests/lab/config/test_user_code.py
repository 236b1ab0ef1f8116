"""A user's code that ends the process or hangs, before the ranks watch each other and after."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distlab.lab.config import ConfigError
from distlab.lab.config.user_code import (
    Exited,
    bounded,
    exits_raised,
    observe_exits,
    raise_exited,
    refusing_exits,
)
from tests.launched import ended_warm

ENDINGS = [
    ("sys.exit(0)", "sys.exit(0)"),
    ("sys.exit()", "sys.exit()"),
    ("raise SystemExit('done')", "sys.exit('done')"),
    ("quit()", "sys.exit()"),
    ("os._exit(0)", "os._exit(0)"),
    ("os.abort()", "os.abort()"),
    ("os.execv('/bin/true', ['true'])", "os.execv()"),
    ("os.execlp('true', 'true')", "os.execv()"),  # os.execlp calls execv
]


def written(folder: Path, line: str) -> str:
    file = folder / "theirs.py"
    file.write_text(f"import os, sys, time\n{line}\n")
    return str(file)


@pytest.mark.parametrize(("line", "call"), ENDINGS)
def test_code_that_ends_the_process_is_refused_with_its_line(line: str, call: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused, refusing_exits(30, ConfigError):
        runpy.run_path(written(tmp_path, line))
    assert f"by {call}" in str(refused.value) and " at theirs.py:2, " in str(refused.value)


def test_code_that_raises_keyboard_interrupt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"raised KeyboardInterrupt at theirs\.py:2"), refusing_exits(30, ConfigError):  # fmt: skip
        runpy.run_path(written(tmp_path, "raise KeyboardInterrupt"))


def test_ctrl_c_stays_ctrl_c(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), refusing_exits(30, ConfigError):
            runpy.run_path(written(tmp_path, "os.kill(os.getpid(), 2); time.sleep(20)"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_exceptions_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="theirs"), refusing_exits(30, ConfigError):
        runpy.run_path(written(tmp_path, "raise ValueError('theirs')"))


def test_a_forked_child_and_a_library_may_exit(tmp_path: Path) -> None:
    observe_exits(raise_exited)
    with exits_raised():
        runpy.run_path(
            written(tmp_path, "child = os.fork()\nchild or os._exit(7)\nassert os.waitpid(child, 0)[1] >> 8 == 7")
        )
    program = (
        "from distlab.lab.config.user_code import observe_exits, raise_exited; observe_exits(raise_exited);"
        " import concurrent.futures as library; exec(compile('import os; os._exit(7)', library.__file__, 'exec'))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 7


def test_an_exit_that_is_raised_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(Exited) as raised, exits_raised():
        runpy.run_path(written(tmp_path, "sys.exit(3)"))
    assert raised.traceback[-1].path == tmp_path / "theirs.py"


def test_code_that_hangs_is_reported_with_its_line(tmp_path: Path) -> None:
    late: list[str] = []
    with bounded(0.2, late.append):
        time.sleep(0.5)  # in a line of this test, not of the user's code
        assert late == []
        runpy.run_path(written(tmp_path, "time.sleep(1.5)"))
    assert late == ["the file still runs at theirs.py:2 after 0.2 s (LAB_JOIN_TIMEOUT_S), so its ranks cannot start"]


LESSON = """{line}
from distlab.contract import Mode, Variant
MODE = Mode(variants=(Variant("one"),))
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import time; time.sleep(600)", "still runs at {place}:1 after 2 s"),
        ("raise SystemExit", "ended the process by sys.exit() at {place}:1"),
    ],
)
@pytest.mark.parametrize("place", ["mode.py", "options.py", "model.py", "wave.py"])
def test_no_file_can_end_or_stop_a_run_silently(place: str, line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").write_text(LESSON.format(line=""))
    for file in (tmp_path / "mode.py", tmp_path / "folder" / "options.py", tmp_path / "model.py", tmp_path / "wave.py"):
        file.write_text(LESSON.format(line=line))
    settings = {
        "mode.py": {"RUN_MODE": str(tmp_path / "mode.py")}, "options.py": {"RUN_MODE": str(tmp_path / "folder")},
        "model.py": {"LAB_MODEL": f"{tmp_path}/model.py:model"}, "wave.py": {"LAB_VARIANT": f"{tmp_path}/wave.py:wave"},
    }[place]  # fmt: skip
    environ = {
        **os.environ,
        **settings,
        "WORLD_SIZE": "2",
        "LAB_JOIN_TIMEOUT_S": "2",
        "LAB_RUNS_DIR": str(tmp_path / "runs"),
    }
    run = ended_warm("distlab", ["run"], environ=environ, timeout_s=60)
    assert run.returncode == 2 and words.format(place=place) in run.stdout, run
