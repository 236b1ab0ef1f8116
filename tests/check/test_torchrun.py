"""Under a torchrun that the user starts: a script that fails on purpose is told of, started again, and then passes."""

import os
import subprocess
import sys
from pathlib import Path

from tests.check.cases import NONE_OF_OURS, SCRIPTS


def test_a_restart_is_a_run_of_its_own(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not NONE_OF_OURS.match(name)}
    own = {"LAB_RUNS_DIR": str(tmp_path / "runs"), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node", "2",
            "-m", "distlab.cli.check", str(SCRIPTS / "right" / "elastic.py"),
        ],
        env=clean | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "rank 1 raised RuntimeError: a fault of this machine at elastic.py:" in done.stdout
    assert "rank 0: resumes at step 3" in done.stdout
    first, second = (line for line in done.stdout.splitlines() if line.startswith(("FAIL ", "PASS ")))
    assert (first.split()[0], second.split()[0]) == ("FAIL", "PASS")
