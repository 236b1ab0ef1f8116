"""Drills in real runs: what LAB_FAULTS plans comes, is named as it should be, and the run says both.

Bits and checkpoints in the pool of ranks; what ends, stops or cuts a rank in processes of its own.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from distlab.lab.cluster.join import Cluster
from distlab.lab.config.fault_spec import parse_faults, planned
from distlab.lab.rank.fault_injection import Drills, outcome_of
from distlab.lab.report import records
from distlab.lab.report.reading import from_line, to_line
from distlab.lab.report.verdict import judge
from distlab.lab.verify import silent_corruption
from distlab.lab.verify.run_all import everything
from distlab.tools.testing.warm_ranks import Ranks
from tests.compose.containers import clean_environ
from tests.labs import TINY, disconnect, failed, lab_of
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
        ("corrupt_checkpoint@step1", "refused"),
        ("flip:weight@step1", "seen"),
    ],
)
def test_what_should_come_of_a_fault(text: str, outcome: str) -> None:
    (event,) = planned(parse_faults(text)[0], 1, 4)
    assert outcome_of(event, lost_after_s=2.5) == outcome


# --- in the pool ---


def drilled(group: dist.ProcessGroup, settings: dict[str, str], folder: str, blind: bool) -> list[str]:
    """The passes of a mode with its drills, or its own training; a `blind` rank hashes what it has not."""
    lab = lab_of(group, settings | {"WORLD_SIZE": str(group.size())}, folder)
    drills = Drills(lab.config, lab.mode, lab.journal, cast(Cluster, None))  # of which only links ask
    lab.hooks, lab.on_tensors = replace(lab.hooks, on_step=drills.step), drills.flips.tensors
    drills.begin()
    with pytest.MonkeyPatch.context() as patch:
        if blind:
            patch.setattr(silent_corruption, "hash_of", lambda tensor: tensor.numel())
        if lab.mode.watched and lab.mode.run is not None:
            lab.mode.run(lab)
        else:  # what a lesson checks of its own takes longer than its drill
            lab.mode = replace(lab.mode, run=None, predict=lambda config: [])
            everything(lab)
    disconnect()
    lab.journal.write(records.End(group.rank(), 0.0, None, 0.0, 0.0))
    return [to_line(record) for record in lab.journal.records]


def run(
    ranks: Ranks, folder: Path, faults: str, given: dict[str, str], *, blind: bool = False, world_size: int = 3
) -> Any:
    settings = SMALL | {"LAB_FAULTS": faults} | given
    lines = ranks(world_size, drilled, settings, str(folder), blind, timeout_s=150)
    return judge({rank: [from_line(line) for line in of_rank] for rank, of_rank in enumerate(lines)})


FLAT = {"RUN_MODE": "dp", "LAB_VARIANT": "flat"}
MODES = {
    "dp": ({"LAB_VARIANT": "flat"}, "named"),
    "tp": ({"LAB_VARIANT": "megatron"}, "named"),
    "fsdp": ({"LAB_VARIANT": "zero3"}, "a check"),
    "pp": ({"LAB_VARIANT": "1f1b", "LAB_DEPTH": "3"}, "a check"),
}


@pytest.mark.parametrize("mode", MODES)
def test_flipped_bits_are_named_or_fail_a_check(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    given, should = MODES[mode]
    found = run(ranks, tmp_path, "flip:gradient:rank1@step2", {"RUN_MODE": mode} | given)
    (drill,) = found["drills"]
    assert drill["held"], drill
    assert drill["should"].startswith(should)
    assert found["verdict"] == "fail"
    names = {check["name"] for check in found["checks"] if not check["passed"]}
    assert ("audited replicas" in names) == (should == "named")


# Bytes that are packed, steps without a message, experts and meshes beside their replicas.
BESIDE = [
    ("compress", "topk", "message", 3, "a check"),
    ("compress", "powersgd", "weight", 3, "named"),
    ("precision", "bf16_master", "gradient", 3, "named"),
    ("server", "local_sgd", "message", 3, "a check"),
    ("cp", "ring", "gradient", 3, "named"),
    ("moe", "ep", "gradient", 3, "named"),
    ("mesh", "gpipe", "weight", 4, "named"),
    ("mesh", "zero3", "gradient", 4, "a check"),
]


@pytest.mark.parametrize(("mode", "variant", "what", "world_size", "should"), BESIDE)
def test_bits_flip_in_every_mode_that_trains(
    ranks: Ranks, tmp_path: Path, mode: str, variant: str, what: str, world_size: int, should: str
) -> None:
    given = {"RUN_MODE": mode, "LAB_VARIANT": variant, "LAB_STEPS": "9" if variant == "local_sgd" else "4"}
    (drill,) = run(ranks, tmp_path, f"flip:{what}:rank1@step2", given, world_size=world_size)["drills"]
    assert drill["held"], drill
    assert drill["should"].startswith(should)


OWN = {
    "elastic": {"RUN_MODE": "elastic", "LAB_DEPTH": "1", "LAB_LOSSES": "0"},
    "largebatch": {"RUN_MODE": "largebatch"},
}
TRAININGS = [
    ("elastic", "shrink", "gradient", "named"),
    ("elastic", "shrink", "message", "a check of the training"),
    ("elastic", "zero1", "gradient", "a check of the training"),
    ("elastic", "zero1", "weight", "named"),
    ("largebatch", "linear", "gradient", "named"),
    ("largebatch", "linear", "weight", "named"),
    ("largebatch", "linear", "message", "a check of the training"),
]


@pytest.mark.parametrize(("mode", "variant", "what", "should"), TRAININGS)
def test_bits_flip_where_a_mode_trains_by_itself(
    ranks: Ranks, tmp_path: Path, mode: str, variant: str, what: str, should: str
) -> None:
    given = OWN[mode] | {"LAB_VARIANT": variant, "LAB_PROOF": "0"}
    found = run(ranks, tmp_path, f"flip:{what}:rank1@step2", given)
    (drill,) = found["drills"]
    assert drill["held"], drill
    assert drill["should"].startswith(should)
    assert found["verdict"] == "fail"


def test_those_who_are_left_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    given = OWN["elastic"] | {"LAB_VARIANT": "shrink", "LAB_LOSSES": "1", "LAB_STEPS": "6", "LAB_AUDIT_EVERY": "2"}
    found = run(ranks, tmp_path, "flip:weight:rank1@step4", given)
    assert [(each["held"], each["did"].partition(" with")[0]) for each in found["drills"]] == [
        (True, "ranks 1, 2 named")
    ]
    assert not failed(found) & {"samples", "record", "updates kept"}


@pytest.mark.parametrize("mode", OWN)
def test_a_blind_audit_of_such_a_training_does_not_hold(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    variant = {"elastic": "shrink", "largebatch": "linear"}[mode]
    found = run(ranks, tmp_path, "flip:weight:rank1@step2", OWN[mode] | {"LAB_VARIANT": variant}, blind=True)
    assert [(each["held"], each["did"]) for each in found["drills"]] == [(False, "nothing differed")]


def test_nothing_is_named_where_nothing_flips(ranks: Ranks, tmp_path: Path) -> None:
    given = OWN["elastic"] | {"LAB_VARIANT": "join", "LAB_LOSSES": "1", "LAB_STEPS": "6", "LAB_AUDIT_EVERY": "1"}
    found = run(ranks, tmp_path, "", given)
    assert not failed(found)
    assert "audited replicas" in {check["name"] for check in found["checks"]}


def test_a_gradient_that_its_rank_has_sent_is_left_alone(ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, "flip:gradient:rank1@step2", {"RUN_MODE": "server", "LAB_VARIANT": "sync"})
    assert [(each["held"], each["did"]) for each in found["drills"]] == [(None, "not made")]
    assert not failed(found)


def test_a_tied_weight_of_a_pipeline_has_two_holders(ranks: Ranks, tmp_path: Path) -> None:
    given = {"RUN_MODE": "pp", "LAB_VARIANT": "gpipe", "LAB_DEPTH": "3", "LAB_TIE": "1", "LAB_SEED": "3"}
    (drill,) = run(ranks, tmp_path, "flip:weight:rank2@step1", given)["drills"]
    assert drill["held"], drill
    assert drill["did"].startswith("ranks 0, 2 named with weights.layers.0.token.weight at step 1")


def test_a_weight_that_zero1_has_gathered_is_named(ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, "flip:weight:rank1@step1", {"RUN_MODE": "fsdp", "LAB_VARIANT": "zero1"})
    assert [(each["held"], each["did"].partition(" with")[0]) for each in found["drills"]] == [(True, "rank 1 named")]


def test_a_message_with_another_bit_is_seen(ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, "flip:message:rank1@step2", FLAT)
    assert [each["held"] for each in found["drills"]] == [True]
    assert failed(found) & {"audited replicas", "audited weights"}


def test_an_audit_that_sees_nothing_does_not_pass_for_one_that_holds(ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, "flip:weight:rank1@step1", FLAT, blind=True)
    assert [(each["held"], each["did"]) for each in found["drills"]] == [(False, "nothing differed")]


def test_what_no_check_could_see_is_not_made(ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, "flip:gradient@step1", {"RUN_MODE": "fsdp", "LAB_VARIANT": "zero3", "LAB_PROOF": "0"})
    assert [(each["held"], each["did"]) for each in found["drills"]] == [(None, "not made")]
    found = run(ranks, tmp_path / "message", "flip:message@step1", FLAT | {"LAB_PROOF": "0"})
    assert [(each["held"], each["did"]) for each in found["drills"]] == [(None, "not made")]


def test_a_damaged_checkpoint_is_passed_over_by_name(ranks: Ranks, tmp_path: Path) -> None:
    given = FLAT | {"LAB_CHECKPOINT_EVERY": "1", "LAB_PROOF": "0"}
    found = run(ranks, tmp_path, "corrupt_checkpoint:rank1@step2", given, world_size=2)
    (drill,) = found["drills"]
    assert drill["held"], drill
    assert re.search(r"step-00000002 is damaged \(\S+: its checksum differs\): taking step 1$", drill["did"])
    assert not failed(found)


def test_two_ranks_that_differ(ranks: Ranks, tmp_path: Path) -> None:
    given = FLAT | {"LAB_VARIANT": "ring", "LAB_MODEL": "mlp", "LAB_AUDIT_EVERY": "2"}
    (drill,) = run(ranks, tmp_path, "flip:weight@step0", given, world_size=2)["drills"]
    assert drill["held"], drill
    assert drill["did"].startswith("ranks 0, 1 named")
    assert drill["did"].endswith("at step 1")


def test_floats_of_other_sizes_are_flipped_too(ranks: Ranks, tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float64"):
        given = FLAT | {"LAB_MODEL": "mlp", "LAB_DTYPE": dtype, "LAB_PROOF": "0"}
        (drill,) = run(ranks, tmp_path / dtype, "flip:gradient@step1", given)["drills"]
        assert drill["held"], drill


# --- in processes of their own ---

QUICK = {"LAB_LOST_AFTER_S": "1", "LAB_PROOF": "0", "WORLD_SIZE": "3"}
PROCESSES = {
    "dp": {"LAB_VARIANT": "ring"},
    "tp": {"LAB_VARIANT": "megatron"},
    "pp": {"LAB_VARIANT": "1f1b", "LAB_DEPTH": "3"},
    "fsdp": {"LAB_VARIANT": "zero2"},
}


def processes(folder: Path, faults: str, **given: str) -> tuple[int, dict[str, Any], str]:
    """A run of local processes: its code, run.json and what it printed."""
    own = {"LAB_RUNS_DIR": str(folder), "LAB_RUN_ID": "drill", "LAB_FAULTS": faults}
    environ = clean_environ(SMALL | QUICK | own | given | {"MASTER_ADDR": ""})
    done = ended_warm("workers", environ=environ, timeout_s=120)
    return done.returncode, json.loads((folder / "drill" / "run.json").read_text()), done.stdout


def test_an_elastic_run_goes_on_without_a_rank_that_is_killed_at_a_step(tmp_path: Path) -> None:
    small = {"LAB_VARIANT": "shrink", "LAB_LOSSES": "0", "LAB_STEPS": "30", "LAB_DEPTH": "1", "LAB_LOST_AFTER_S": "2.5"}
    code, found, said = processes(tmp_path, "kill:rank0@step12", RUN_MODE="elastic", **small)
    assert (code, found["verdict"]) == (137, "pass"), said
    assert [(drill["held"], drill["did"]) for drill in found["drills"]] == [
        (True, "rank 0 left, and the remaining ranks continued")
    ]


@pytest.mark.parametrize("mode", PROCESSES)
def test_a_killed_rank_is_named_in_time(tmp_path: Path, mode: str) -> None:
    code, found, said = processes(tmp_path, "kill:rank1@step2", RUN_MODE=mode, **PROCESSES[mode])
    assert (code, found["verdict"]) == (3, "lost"), said
    assert [drill["held"] for drill in found["drills"]] == [True], said
    assert re.search(r"rank 0 \| fault +kill rank 1 at step 2: rank 1 named by 2 .*\(as expected\)", said)


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
def test_each_fault_ends_as_it_should(tmp_path: Path, faults: str, code: int) -> None:
    more = {"LAB_STEPS": "2000"} if faults.endswith("ms") else {}
    if not faults.startswith(
        ("pause", "cut")
    ):  # nobody falls silent: with 1 s ranks that had no core for so long were lost
        more |= {"LAB_LOST_AFTER_S": "2.5"}
    ended, found, said = processes(tmp_path, faults, RUN_MODE="dp", LAB_VARIANT="flat", **more)
    assert ended == code, said
    assert {drill["held"] for drill in found["drills"]} == {True}, said
    assert len(found["drills"]) == 1 + faults.count(",")
