"""Every planted fault is named with its ranks, the number of the call in its group, and both lines. There is no false
alarm: right scripts end with 0, without a finding and without a question."""

import re
from pathlib import Path

import pytest

from tests.launched import clean, ended_warm
from tests.tools.check.cases import (
    PLANTED,
    RIGHT,
    SCRIPTS,
    Planted,
    assert_ended,
    check,
    check_text,
    line_of,
    missing,
    too_wide,
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_it_is_named(planted: Planted, tmp_path: Path) -> None:
    script = SCRIPTS / "faults" / f"{planted.name}.py"
    checked = check(script, planted.world_size, tmp_path, LAB_HANG_AFTER_S="2")
    assert checked.code == planted.exit_code, checked.output
    assert not missing(planted, checked), checked.output
    assert not too_wide(checked.output)
    texts = [line.removeprefix("rank 0 | ") for line in checked.output.splitlines()]
    assert any(text.startswith(("FAIL  ", "PASS  ")) and len(text) < 80 for text in texts)


@pytest.mark.parametrize(("name", "world_size"), RIGHT.items())
def test_a_right_script_has_no_finding(name: str, world_size: int, tmp_path: Path) -> None:
    checked = check(SCRIPTS / "right" / f"{name}.py", world_size, tmp_path)
    assert checked.code == 0, checked.output
    assert not checked.sentences
    assert "question" not in checked.output
    assert "is not recorded" not in checked.output


def test_end_comparisons_are_made_before_an_exit_too(tmp_path: Path) -> None:
    source = (SCRIPTS / "faults" / "drifted.py").read_text()
    checked = check_text(f"{source}\nimport os\nos._exit(0)\n", tmp_path, world_size=3)
    assert_ended(checked, 1, "drifted apart")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("raise KeyboardInterrupt", "ranks 0 and 1 raised KeyboardInterrupt at train.py:2"),
        ("sys.stderr.close(); sys.exit('no text')", "ranks 0 and 1 called sys.exit with no text at train.py:2"),
        ("os.execv('/bin/true', ['true'])", "the script runs another program by os.execv() at train.py:2"),
    ],
)
def test_a_script_that_ends_before_it_has_begun_does_not_pass(line: str, words: str, tmp_path: Path) -> None:
    assert_ended(check_text(f"import os, sys\n{line}\n", tmp_path), 1, words)


# torchrun's agent, except that its ranks are forked from it, so that they import nothing again.
AGENT = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from distlab.cli import check

def be_rank():
    sys.exit(check.main(sys.argv[1:]))

config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, run_id="one", rdzv_backend="c10d",
    rdzv_endpoint="localhost:0", start_method="fork", monitor_interval=0.1,
)
elastic_launch(config, be_rank)()
"""


def test_a_restart_under_torchrun_is_a_run_of_its_own(tmp_path: Path) -> None:
    """A script that fails on purpose is reported, restarted by its agent, and then passes."""
    own = {"LAB_RUNS_DIR": str(tmp_path / "runs"), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [AGENT, str(SCRIPTS / "right" / "elastic.py")]
    done = ended_warm("-c", words, environ=clean(**own), timeout_s=110)
    assert done.returncode == 0, done.stdout
    output = " ".join(done.stdout.split())
    assert "rank 1 raised RuntimeError: a fault of this machine at elastic.py:" in output
    assert "rank 0: resumes at step 3" in done.stdout
    first, second = (line for line in done.stdout.splitlines() if line.startswith(("FAIL ", "PASS ")))
    assert (first.split()[0], second.split()[0]) == ("FAIL", "PASS")


def test_all_scripts_are_in_the_tables() -> None:
    under_an_agent = {"elastic"}
    assert {path.stem for path in (SCRIPTS / "right").glob("*.py")} == {*RIGHT, *under_an_agent}
    assert {path.stem for path in (SCRIPTS / "faults").glob("*.py")} == {planted.name for planted in PLANTED}
    for planted in PLANTED:
        for marker in planted.lines:
            assert re.fullmatch(rf"{planted.name}\.py:\d+", line_of(SCRIPTS / "faults" / f"{planted.name}.py", marker))
