"""A user's model and training step in containers: proven, in dp next to PyTorch's variant, and sharded by fsdp."""

import json
from pathlib import Path

import pytest

from tests.compose.containers import call

pytestmark = [pytest.mark.compose, pytest.mark.timeout(240)]
MODEL = "LAB_MODEL=mine/own.py:model"
TINY = ("LAB_STEPS=4", "LAB_SEQ=16", "WORLD_SIZE=3")


def run_of(clone: Path, *words: str) -> dict[str, object]:
    """Return the run.json of `./run WORDS`, which must pass."""
    done = call("./run", *words, folder=clone, timeout_s=200, check=False)
    assert done.returncode == 0, done.stdout
    found: dict[str, object] = json.loads((clone / "runs/latest/run.json").read_text())
    assert (found["verdict"], found["proven"]) == ("pass", True)
    return found


def test_prove_passes_in_containers(clone: Path) -> None:
    run = run_of(clone, "prove", "WORLD_SIZE=3", "mine/own.py")
    assert run["run_mode"] == "prove"


def test_modes_run_the_users_model_and_step(clone: Path) -> None:
    run = run_of(clone, "dp", *TINY, MODEL, "LAB_VARIANT=ddp,mine/own.py:train_step")
    assert [each["name"] for each in run["variants"]] == ["ddp", "mine/own.py:train_step"]  # type: ignore[attr-defined]
    run_of(clone, "fsdp", *TINY, MODEL, "LAB_VARIANT=zero3,fsdp2")
