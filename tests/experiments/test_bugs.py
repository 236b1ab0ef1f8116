"""Every LAB_BUG of every mode, through the whole experiment: the check that is meant for it fails, by name."""

import importlib
from pathlib import Path

import pytest

from tests.labs import failed, run_experiment
from tests.ranks import Ranks
from workers.config.values import modes

# Enough variants for every mistake of the mode, and no more: a naive one makes dozens of calls a step.
NARROW = {
    "comm": "ring",
    "dp": "flat,bucketed,ddp",
    "tp": "naive,megatron",
    "pp": "gpipe,1f1b",
    "fsdp": "zero2,zero3",
    "compress": "int8,randomk,powersgd",
    "server": "ssp",
    "largebatch": "linear",
    "precision": "fp16_master",
}
# What a mistake needs to be made at all.
NEEDS = {
    "local_clip": {"LAB_CLIP": "0.05"},
    "per_rank_norm": {"LAB_CLIP": "0.05"},
    "lost_shard_tail": {"LAB_WIDTH": "20"},
    "save_without_barrier": {"LAB_CHECKPOINT_EVERY": "2"},
    "resume_repeats_epoch": {"LAB_CHECKPOINT_EVERY": "2"},
    "lr_unscaled": {"LAB_MODEL": "mlp"},
    "unscaled_clip": {"LAB_CLIP": "0.05"},
}
BUGS = [(mode, bug) for mode in modes() for bug in importlib.import_module(f"experiments.{mode}").BUGS]


@pytest.mark.parametrize("mode", modes())
def test_without_a_bug_every_check_holds(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    run, _ = run_experiment(ranks, 3, tmp_path, RUN_MODE=mode, LAB_VARIANT=NARROW.get(mode, ""))
    assert failed(run) == set()
    assert run["verdict"] == "pass"


@pytest.mark.parametrize(("mode", "bug"), BUGS)
def test_each_bug_fails_the_check_that_is_meant_for_it(ranks: Ranks, tmp_path: Path, mode: str, bug: str) -> None:
    settings = {"RUN_MODE": mode, "LAB_BUG": bug, "LAB_VARIANT": NARROW.get(mode, "")} | NEEDS.get(bug, {})
    run, _ = run_experiment(ranks, 3, tmp_path, **settings)
    meant = importlib.import_module(f"experiments.{mode}").BUGS[bug].check
    assert meant in failed(run)
    assert run["verdict"] == "fail"
