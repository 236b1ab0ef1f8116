"""A run whose output cannot be written continues without it, and logs the reason."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.lab.cluster.launch import needed_files

SMALL = {
    "RUN_MODE": "dp", "WORLD_SIZE": "2", "LAB_MODEL": "mlp", "LAB_STEPS": "2", "LAB_WIDTH": "8", "LAB_DEPTH": "1", "LAB_SEQ": "8",
    "LAB_VARIANT": "flat", "LAB_RUN_ID": "run",
}  # fmt: skip
NOT_PRINTED = "output     nothing more is printed ({}): the run continues, and its log file has everything"


def shell(words: str, runs: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash with PYTHON as the interpreter; the exit code is that of a pipe's first command."""
    variables = os.environ | {"LAB_RUNS_DIR": str(runs), "PYTHON": sys.executable} | environ
    command = ["bash", "-c", f"{words}; exit ${{PIPESTATUS[0]}}"]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)


def verdict(runs: Path) -> str:
    return str(json.loads((runs / "run" / "run.json").read_text())["verdict"])


@pytest.mark.parametrize(
    ("redirected", "why"),
    [
        (">&-", "Bad file descriptor"), (">/dev/full", "No space left on device"), ("| head -1", "Broken pipe"),
        ("2>&-", ""), ("<&-", ""), ("<&- >&- 2>&-", "Bad file descriptor"),
    ],
)  # fmt: skip
def test_a_run_without_output_continues_and_logs_it(tmp_path: Path, redirected: str, why: str) -> None:
    done = shell(f'"$PYTHON" -m workers {redirected}', tmp_path, **SMALL)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and verdict(tmp_path) == "pass"
    log = (tmp_path / "run" / "rank0.log").read_text().splitlines()
    assert log.count(NOT_PRINTED.format(why)) == bool(why) and any(line.startswith("PASS") for line in log)
    assert not any(line.startswith("output") for line in (tmp_path / "run" / "rank1.log").read_text().splitlines())
    if "1" not in redirected and "&-" in redirected and not why:
        assert "rank 0 | PASS" in done.stdout


@pytest.mark.parametrize("redirected", [">&-", "<&- >&- 2>&-"])
def test_a_check_without_output_continues(tmp_path: Path, redirected: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")
    words = f'"$PYTHON" -m workers check WORLD_SIZE=2 {script} {redirected}'
    done = shell(words, tmp_path, LAB_RUN_ID="run", PYTHONHASHSEED="random")
    assert done.returncode == 0 and verdict(tmp_path) == "pass", done.stderr


@pytest.mark.parametrize("redirected", [">&-", ">/dev/full", "| true"])
def test_a_rank_of_a_launcher_continues_without_output(tmp_path: Path, redirected: str) -> None:
    alone = SMALL | {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29719"}
    done = shell(f'"$PYTHON" -m workers {redirected}', tmp_path, **alone)
    assert done.returncode == 0 and verdict(tmp_path) == "pass", done.stderr
    log = (tmp_path / "run" / "rank0.log").read_text()
    assert log.count("output     nothing more is printed") == 1 and "\nPASS" in log


@pytest.mark.parametrize("redirected", [">&-", ">/dev/full"])
def test_a_refusal_without_output_has_its_exit_code(tmp_path: Path, redirected: str) -> None:
    done = shell(f'"$PYTHON" -m workers {redirected}', tmp_path, RUN_MODE="nothing")
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize(
    ("redirected", "why"), [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")]
)
def test_a_command_whose_output_cannot_be_written_fails(tmp_path: Path, redirected: str, why: str) -> None:
    done = shell(f'"$PYTHON" -m workers explain dp {redirected}', tmp_path)
    assert (done.returncode, done.stderr) == (1, f"broken     the output cannot be written: {why}\n")


def test_too_few_descriptors_are_refused_before_a_rank_is_started(tmp_path: Path) -> None:
    done = shell('ulimit -n 24; "$PYTHON" -m workers', tmp_path, **SMALL)
    sentence = f"a process may open 24 files here, and 2 local ranks need {needed_files(2)} each: set"
    assert done.returncode == 2 and done.stdout == f"refused    {sentence} `ulimit -n {needed_files(2)}` or more\n"
    assert done.stderr == "" and list(tmp_path.iterdir()) == []
    script = tmp_path / "script.py"
    script.touch()
    assert shell(f'ulimit -n 24; "$PYTHON" -m workers check WORLD_SIZE=2 {script}', tmp_path).returncode == 2


@pytest.mark.parametrize("mode", ["dp", "moe"])
def test_the_stated_number_of_descriptors_is_enough(tmp_path: Path, mode: str) -> None:
    settings = SMALL | {"RUN_MODE": mode} | ({} if mode == "dp" else {"LAB_MODEL": "", "LAB_VARIANT": "ep"})
    done = shell(f'ulimit -n {needed_files(2)}; "$PYTHON" -m workers', tmp_path, **settings)
    assert done.returncode == 0 and verdict(tmp_path) == "pass", done.stdout + done.stderr


CLOSED = """
import os, sys
from distlab.lab.report.standard_streams import open_standard_streams
for number in map(int, sys.argv[1]):
    os.close(number)
open_standard_streams()
first = os.open(os.devnull, os.O_RDONLY)
assert first > 2, first
assert [os.readlink(f"/proc/self/fd/{number}") for number in map(int, sys.argv[1])] == [os.devnull] * len(sys.argv[1])
assert all(map(os.get_inheritable, range(3)))
assert sys.stdin is not None and sys.stdout is not None and sys.stderr is not None
os._exit(7)
"""


@pytest.mark.parametrize("numbers", ["0", "1", "2", "01", "12", "02", "012"])
def test_no_file_gets_the_number_of_a_closed_stream(numbers: str) -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED, numbers], capture_output=True, timeout=30, check=False)
    assert done.returncode == 7, done.stderr.decode()


PARTS = """
from distlab.lab.report.standard_streams import open_standard_streams, printed
open_standard_streams()
print("sum", 2.0)
printed("rank 0 | PASS")
"""


def test_each_line_is_one_write() -> None:
    reads, writes = os.pipe2(os.O_DIRECT)  # each read returns the data of one write
    command, environ = [sys.executable, "-c", PARTS], os.environ | {"PYTHONUNBUFFERED": "1"}
    subprocess.run(command, stdout=writes, env=environ, timeout=30, check=True)
    os.close(writes)
    assert [os.read(reads, 1000) for _ in range(3)] == [b"sum 2.0\n", b"rank 0 | PASS\n", b""]
    os.close(reads)
