"""A rank of check and of the pytest plugin has a process like one under torchrun: the same facts differ between ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launched import clean, ended
from tests.tools.check.cases import check

SCRIPT = Path(__file__).with_name("facts.py")
OF_THE_AGENT = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}  # variables of torchrun's agent
ON_RANKS = f"""
import random
import sys
from pathlib import Path

import distlab
import numpy
import torch

sys.path.insert(0, {str(SCRIPT.parent)!r})


@distlab.ranks(2)
def test_that_sets_equal_seeds(rank):
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(3)


@distlab.ranks(2)
def test_facts(rank):
    import facts

    facts.write_facts(Path(__file__).parent, rank, of_script=False)
"""


def facts_of(folder: Path, *words: str, **environ: str) -> list[list[dict[str, Any]]]:
    """The facts that each of two ranks has written; the command runs in the script's folder, as check runs it too."""
    own = {"FACTS_DIR": str(folder), "OMP_NUM_THREADS": "1", "LAB_RUNS_DIR": str(folder / "runs")}
    variables = clean(**own | environ)
    if "PYTHONHASHSEED" not in environ:
        variables.pop("PYTHONHASHSEED", None)
    done = ended([sys.executable, "-m", *words], cwd=SCRIPT.parent, environ=variables, timeout_s=110)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: the script creates no group
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    words = ["torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT)]
    return facts_of(tmp_path_factory.mktemp("torchrun"), *words)


def differing(ranks: list[list[dict[str, Any]]]) -> dict[str, bool]:
    """Whether the two ranks differ, fact by fact."""
    return {name: ranks[0][0][name] != ranks[1][0][name] for name in ranks[0][0]}


def test_under_torchrun_all_facts_that_should_differ_do(by_torchrun: list[list[dict[str, Any]]]) -> None:
    assert all(differing(by_torchrun).values())


def test_a_rank_of_check_is_like_one_under_torchrun(by_torchrun: list[list[dict[str, Any]]], tmp_path: Path) -> None:
    found = facts_of(tmp_path, "distlab", "check", str(SCRIPT), WORLD_SIZE="2")
    assert differing(found) == differing(by_torchrun)
    for (_, mine), (_, theirs) in zip(found, by_torchrun, strict=True):
        assert {*theirs["variables"]} - {*mine["variables"]} <= OF_THE_AGENT
        assert mine | {"variables": []} == theirs | {"variables": []}


def test_a_rank_of_the_plugin_is_like_one_under_torchrun(
    by_torchrun: list[list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "test_facts.py").write_text(ON_RANKS)
    found = facts_of(tmp_path, "pytest", "-p", "no:cacheprovider", "-o", "addopts=", str(tmp_path))
    assert differing(found) == differing(by_torchrun)
    for (_, mine), (_, theirs) in zip(found, by_torchrun, strict=True):
        assert mine == {name: theirs[name] for name in mine}


def test_with_a_fixed_hash_seed_only_hashes_are_equal(tmp_path: Path) -> None:
    found = facts_of(tmp_path, "distlab", "check", str(SCRIPT), WORLD_SIZE="2", PYTHONHASHSEED="7")
    equal = {name for name, differs in differing(found).items() if not differs}
    assert equal == {"the hash of a text", "the order of a set"}


def test_a_single_rank_has_its_own_fork_server_too(tmp_path: Path) -> None:
    script = SCRIPT.parent.parent / "scripts" / "right" / "ddp.py"
    assert check(script, 1, tmp_path, PYTHONHASHSEED="random").code == 0
