"""`./run check` in containers: it names a planted hang and a mismatch, passes a correct script, and leaves its folder
unchanged."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.compose.containers import TOP, call
from tests.tools.check.cases import SCRIPTS, line_of

pytestmark = [pytest.mark.compose, pytest.mark.timeout(240)]


def check(clone: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and the unwrapped output of `./run check WORDS`."""
    done = call("./run", "check", *words, folder=clone, timeout_s=200, check=False)
    return done.returncode, re.sub(r"\s*\n(\x1b\[2K)?(worker\d+-\d+ +\|)? {5,}", " ", done.stdout)


def test_check_finds_a_hang_and_a_mismatch(clone: Path) -> None:
    scripts = SCRIPTS.relative_to(TOP)
    code, output = check(clone, "WORLD_SIZE=2", str(scripts / "faults/send_send.py"))
    assert code == 1, output
    assert f"send #0 to rank 1 at {line_of(SCRIPTS / 'faults/send_send.py', 'a')}" in output
    code, output = check(clone, "WORLD_SIZE=3", str(scripts / "faults/shape.py"))
    assert code == 1, output
    assert "shape mismatch" in output
    code, output = check(clone, "WORLD_SIZE=2", str(scripts / "right/ddp.py"))
    assert code == 0, output
    run = json.loads((clone / "runs/latest/run.json").read_text())
    assert (run["verdict"], run["findings"]) == ("pass", [])
    strangers = {str(path) for path in (clone / "runs").rglob("*") if path.lstat().st_uid != 1234}
    assert strangers == set()


USER = """
import sys

import inflection
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
if rank == 0:
    torch.save(torch.ones(2), "checkpoint.pt")
dist.barrier()
print("loaded", torch.load("checkpoint.pt").tolist(), inflection.camelize(sys.argv[1]), open("data.txt").read())
dist.destroy_process_group()
"""


def test_check_provides_the_users_packages_and_files(clone: Path) -> None:
    folder = clone / "someone"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in (("train.py", USER), ("data.txt", "next to it"), ("requirements.txt", "inflection==0.5.1\n")):
        (folder / name).write_text(text)
    code, output = check(clone, "WORLD_SIZE=2", "LAB_REQUIREMENTS=requirements.txt", "someone/train.py", "it's a_day")
    assert code == 0, output
    assert "loaded [1.0, 1.0] It's aDay next to it" in output
    assert "this machine has no GPU, so check uses gloo" in output
    assert {path.name for path in folder.iterdir()} == {"train.py", "data.txt", "requirements.txt"}
    assert (clone / "runs/latest/scratch/checkpoint.pt").is_file()
    code, output = check(clone, "WORLD_SIZE=2", "someone/trian.py")
    assert (code, "does not exist" in output) == (2, True), output
    code, output = check(clone, "WORLD_SIZE=2", "LAB_HANG_AFTER=3", "someone/train.py")
    assert (code, "did you mean 'LAB_HANG_AFTER_S'?" in output) == (2, True), output
