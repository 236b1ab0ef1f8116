"""compose/restart.yaml with real SIGKILLs: any rank, at any step, also during a save, and equal final weights."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.checkpoint.locate import candidates, step_of
from tests.compose.conftest import give_back
from tests.compose.containers import TINY, TOP, Containers, call

pytestmark = [pytest.mark.compose, pytest.mark.timeout(240)]

WORLD_SIZE, STEPS, EVERY = 2, 200, 25
SETTINGS = TINY | {
    "LAB_VARIANT": "flat", "LAB_PROOF": "0", "LAB_OPTIMIZER": "adamw", "LAB_STEPS": str(STEPS), "LAB_CHECKPOINT_EVERY": str(EVERY),
}  # fmt: skip
# The image has no pkill; `kill` is the shell's own.
FIND = (
    'for p in /proc/[0-9]*; do [ "$(tr "\\0" " " < $p/cmdline)" != "python -m workers " ] || rank=${p#/proc/}; done; '
)
IN_A_SAVE = "until ls runs/restart/checkpoints/.step-*.partial >/dev/null 2>&1; do :; done; "
KILL = "kill -9 $rank"


@pytest.fixture
def restarting(image: str, tmp_path: Path) -> Iterator[Containers]:
    """Return a cluster whose ranks are restarted."""
    runs = tmp_path / "runs"
    runs.mkdir()
    containers = Containers(image, runs, TOP / "compose" / "restart.yaml")
    yield containers
    containers.down()
    give_back(image, tmp_path)


def until_saved(cluster: Containers, step: int, timeout_s: float = 60) -> None:
    """Wait until the run has a checkpoint of this step or a later one."""
    deadline = time.monotonic() + timeout_s
    while not any(step_of(path) >= step for path in candidates(cluster.runs / "restart")):
        assert time.monotonic() < deadline, f"no checkpoint of step {step} in {timeout_s} s:\n{cluster.logs()}"
        time.sleep(0.02)


def kill_inside(cluster: Containers, rank: int, *, in_a_save: bool) -> None:
    call("docker", "exec", cluster.name(rank), "sh", "-c", FIND + (IN_A_SAVE if in_a_save else "") + KILL)


def until_all_ended(cluster: Containers, timeout_s: float = 90) -> list[int]:
    """Wait for all ranks and return their last exit codes; a container that is restarted is not `exited` in between."""
    deadline = time.monotonic() + timeout_s
    while True:
        states = [cluster.state(rank) for rank in range(WORLD_SIZE)]
        if all(state["Status"] == "exited" for state in states):
            return [state["ExitCode"] for state in states]
        assert time.monotonic() < deadline, f"the ranks did not end in {timeout_s} s:\n{cluster.logs()}"
        time.sleep(0.2)


def verdict(cluster: Containers, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cluster.runs / run / "run.json").read_text())
    return found


def test_killed_ranks_resume_and_end_with_equal_weights(restarting: Containers) -> None:
    assert set(restarting.run(WORLD_SIZE, LAB_RUN_ID="whole", **SETTINGS).values()) == {0}, restarting.logs()
    draw = random.Random(4)
    steps = [draw.randrange(begin, begin + 75, EVERY) for begin in (EVERY, 100)]
    restarting.up(WORLD_SIZE, **SETTINGS)
    for step, rank, in_a_save in zip(steps, (draw.randrange(1, WORLD_SIZE), 0), (False, True), strict=True):
        until_saved(restarting, step)
        kill_inside(restarting, rank, in_a_save=in_a_save)
        if in_a_save:
            assert list((restarting.runs / "restart" / "checkpoints").glob(".step-*.partial")), "the save was over"
    assert until_all_ended(restarting) == [0] * WORLD_SIZE, restarting.logs()
    assert restarting.log(0).count("resumed from epoch") == len(steps)
    run, whole = verdict(restarting, "restart"), verdict(restarting, "whole")
    assert (run["verdict"], run["resumed"]["step"] >= steps[-1]) == ("pass", True)
    assert run["variants"][0]["weights_sha256"] == whole["variants"][0]["weights_sha256"] is not None
    assert not list((restarting.runs / "restart" / "checkpoints").glob(".*"))
    for rank in range(WORLD_SIZE):
        text = (restarting.runs / "restart" / f"rank{rank}.log").read_text()
        assert text.count("again      attempt") == len(steps)
