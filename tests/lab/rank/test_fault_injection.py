"""Fault injection in real runs: the faults of LAB_FAULTS occur, and the run reports each with its outcome.

Each run has its own processes, because a fault ends, stops or cuts off a rank.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.config.fault_spec import parse_faults, planned
from distlab.lab.rank.fault_injection import outcome_of
from tests.compose.containers import clean_environ
from tests.labs import TINY
from tests.launched import ended_warm

pytestmark = pytest.mark.timeout(180)
SMALL = TINY | {"MASTER_ADDR": "127.0.0.1", "LAB_STEPS": "4"}


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("kill@step1", "lost"),
        ("pause:2.5s@step1", "survived"),
        ("pause:3s@step1", "open"),
        ("pause@step1", "lost"),
        ("cut@step1", "lost"),
        ("cut:in@step1", "broken"),
        ("cut:out@step1", "lost"),
        ("cut:1s@step1", "survived"),
        ("slow_link:10mbit@step1", "survived"),
        ("slow_rank:0.5@step1", "survived"),
        ("full_disk@step1", "full"),
    ],
)
def test_the_expected_outcome_of_a_fault(text: str, outcome: str) -> None:
    (event,) = planned(parse_faults(text)[0], 1, 4)
    assert outcome_of(event, lost_after_s=2.5) == outcome


QUICK = {"LAB_LOST_AFTER_S": "1", "LAB_PROOF": "0", "WORLD_SIZE": "3"}
PROCESSES = {
    "dp": {"LAB_VARIANT": "ring"},
    "tp": {"LAB_VARIANT": "megatron"},
    "pp": {"LAB_VARIANT": "1f1b", "LAB_DEPTH": "3"},
    "fsdp": {"LAB_VARIANT": "zero2"},
}


def processes(folder: Path, faults: str, **settings: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code of a run of local processes, its run.json and its output."""
    own = {"LAB_RUNS_DIR": str(folder), "LAB_RUN_ID": "drill", "LAB_FAULTS": faults}
    environ = clean_environ(SMALL | QUICK | own | settings | {"MASTER_ADDR": ""})
    done = ended_warm("workers", environ=environ, timeout_s=120)
    return done.returncode, json.loads((folder / "drill" / "run.json").read_text()), done.stdout


def test_an_elastic_run_continues_after_a_rank_is_killed(tmp_path: Path) -> None:
    small = {"LAB_VARIANT": "shrink", "LAB_LOSSES": "0", "LAB_STEPS": "30", "LAB_DEPTH": "1", "LAB_LOST_AFTER_S": "2.5"}
    code, found, output = processes(tmp_path, "kill:rank0@step12", RUN_MODE="elastic", **small)
    assert (code, found["verdict"]) == (137, "pass"), output
    assert [(drill["held"], drill["did"]) for drill in found["drills"]] == [
        (True, "rank 0 left, and the remaining ranks continued")
    ]


@pytest.mark.parametrize("mode", PROCESSES)
def test_a_killed_rank_is_named_in_time(tmp_path: Path, mode: str) -> None:
    code, found, output = processes(tmp_path, "kill:rank1@step2", RUN_MODE=mode, **PROCESSES[mode])
    assert (code, found["verdict"]) == (3, "lost"), output
    assert [drill["held"] for drill in found["drills"]] == [True], output
    assert re.search(r"rank 0 \| fault +kill rank 1 at step 2: rank 1 named by 2 .*\(as expected\)", output)


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ("pause:rank1:500ms@step1,slow_rank:rank0:0.5@step1,slow_link:rank2:100mbit@step2", 0),
        ("pause:rank0:3s@step1", 3),
        ("cut:rank0@step1", 3),
        ("cut:rank1:in@step1", 3),
        ("cut:rank2:out@step1", 3),
        ("full_disk:rank1@step1", 1),
        ("kill@300ms", 3),
    ],
)
def test_each_fault_ends_the_run_with_its_exit_code(tmp_path: Path, faults: str, code: int) -> None:
    more = {"LAB_STEPS": "2000"} if faults.endswith("ms") else {}
    if not faults.startswith(("pause", "cut")):  # no rank is silent: with 1 s, a rank without a core would be lost
        more |= {"LAB_LOST_AFTER_S": "2.5"}
    ended, found, output = processes(tmp_path, faults, RUN_MODE="dp", LAB_VARIANT="flat", **more)
    assert ended == code, output
    assert {drill["held"] for drill in found["drills"]} == {True}, output
    assert len(found["drills"]) == 1 + faults.count(",")
