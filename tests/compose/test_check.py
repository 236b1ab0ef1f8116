"""`./run check` in containers: a planted hang and a mismatch are named, a right script passes; its folder stays as it is."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.compose.containers import TOP, call
from tests.tools.check.cases import SCRIPTS, line_of

pytestmark = [pytest.mark.compose, pytest.mark.timeout(240)]


def check(clone: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of `./run check WORDS`, its sentences however they were wrapped."""
    done = call("./run", "check", *words, folder=clone, timeout_s=200, check=False)
    return done.returncode, re.sub(r"\s*\n(\x1b\[2K)?(worker\d+-\d+ +\|)? {5,}", " ", done.stdout)


def test_check_finds_a_hang_and_a_mismatch(clone: Path) -> None:
    scripts = SCRIPTS.relative_to(TOP)
    code, said = check(clone, "WORLD_SIZE=2", str(scripts / "faults/send_send.py"))
    assert code == 1, said
    assert f"send #0 to rank 1 at {line_of(SCRIPTS / 'faults/send_send.py', 'a')}" in said
    code, said = check(clone, "WORLD_SIZE=3", str(scripts / "faults/shape.py"))
    assert code == 1, said
    assert "shape mismatch" in said
    code, said = check(clone, "WORLD_SIZE=2", str(scripts / "right/ddp.py"))
    assert code == 0, said
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
    for name, text in (("train.py", USER), ("data.txt", "beside it"), ("requirements.txt", "inflection==0.5.1\n")):
        (folder / name).write_text(text)
    code, said = check(clone, "WORLD_SIZE=2", "LAB_REQUIREMENTS=requirements.txt", "someone/train.py", "it's a_day")
    assert code == 0, said
    assert "loaded [1.0, 1.0] It's aDay beside it" in said
    assert "this machine has no GPU, so check uses gloo" in said
    assert {path.name for path in folder.iterdir()} == {"train.py", "data.txt", "requirements.txt"}
    assert (clone / "runs/latest/scratch/checkpoint.pt").is_file()
    code, said = check(clone, "WORLD_SIZE=2", "someone/trian.py")
    assert (code, "does not exist" in said) == (2, True), said
    code, said = check(clone, "WORLD_SIZE=2", "LAB_HANG_AFTER=3", "someone/train.py")
    assert (code, "did you mean 'LAB_HANG_AFTER_S'?" in said) == (2, True), said
