"""Settings that a rank refuses before it joins, the lock on a run's folder, and the choice of a GPU."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.contract import Instead, Mistake, Mode, Variant
from distlab.lab.config import Config, ConfigError
from distlab.lab.rank.main import lock_folder, source_version, start_record
from distlab.lab.rank.mode_loader import check_cards, load, pick_device
from distlab.lab.rank.preflight import refuse, unwritable
from tests.launched import clean, ended_warm

LOST = Mistake("a shard is lost", "gradients", Instead(run={"shards": 0}))
MODE = Mode(variants=(Variant("naive"), Variant("ring")), mistakes={"lost_shard": LOST}, refuse=lambda config: [])


def config_of(**environ: str) -> Config:
    return Config.read({"RANK": "0", "MASTER_ADDR": "127.0.0.1"} | environ)


def refused(tmp_path: Path, mode: Mode = MODE, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        refuse(config_of(LAB_RUNS_DIR=str(tmp_path), **environ), mode)
    return error.value.faults


def test_known_variants_and_bugs_are_accepted(tmp_path: Path) -> None:
    refuse(config_of(LAB_RUNS_DIR=str(tmp_path), LAB_VARIANT="ring,naive", LAB_BUG="lost_shard"), MODE)


def test_an_unknown_variant_and_an_unknown_bug_are_reported_together(tmp_path: Path) -> None:
    variant, bug = refused(tmp_path, LAB_VARIANT="rign", LAB_BUG="lost_shards")
    assert variant == "LAB_VARIANT='rign' is not a variant of dp (did you mean 'ring'?), allowed: naive, ring"
    assert bug == "LAB_BUG='lost_shards' is not a bug of dp (did you mean 'lost_shard'?), allowed: lost_shard"


def test_the_replacement_of_a_removed_variant_or_bug_is_named(tmp_path: Path) -> None:
    mode = replace(
        MODE, gone={"tree": "LAB_VARIANT=ring sums the same", "lost_leaf": "LAB_BUG=lost_shard loses as much"}
    )
    assert refused(tmp_path, mode, LAB_VARIANT="tree", LAB_BUG="lost_leaf") == [
        "LAB_VARIANT='tree' is not a variant of dp any more: LAB_VARIANT=ring sums the same, allowed: naive, ring",
        "LAB_BUG='lost_leaf' is not a bug of dp any more: LAB_BUG=lost_shard loses as much, allowed: lost_shard",
    ]


def test_mystery_bugs_and_modes_without_variants_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, LAB_BUG="mystery:7") == [
        "LAB_BUG='mystery:7' is not a bug of dp: bugs are no longer drawn by a number, so name one, allowed: lost_shard"
    ]
    printed = ["LAB_VARIANT='ring' is not a variant of dp, allowed: none, leave it unset"]
    assert refused(tmp_path, replace(MODE, variants=()), LAB_VARIANT="ring") == printed


THREADED = """
import sys, threading
from types import SimpleNamespace
seen = {}

def be_rank(config, started_at, parent, engine):
    import torch
    matrix = torch.randn(128, 60, generator=torch.Generator().manual_seed(1))
    other = threading.Thread(target=lambda: seen.update(other=torch.linalg.qr(matrix).Q))
    other.start()
    other.join()
    return 40 + torch.equal(torch.linalg.qr(matrix).Q, seen["other"]) + torch.get_num_threads()

sys.modules["distlab.lab.rank.main"] = SimpleNamespace(be_rank=be_rank)
from distlab.cli.run import main
sys.exit(main())
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_all_threads_of_a_rank_compute_the_same_bits(threads: int) -> None:
    """Weights must not depend on the thread that runs a hook, gloo's or the rank's."""
    environ = os.environ | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": str(threads)}
    assert subprocess.run([sys.executable, "-c", THREADED], env=environ).returncode == 41 + threads


def test_an_existing_run_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    refuse(
        config_of(LAB_RUNS_DIR=str(tmp_path), LAB_RUN_ID="mine"), MODE
    )  # an empty folder, made by the launcher that chose the name
    refuse(config_of(LAB_RUNS_DIR=str(tmp_path), LAB_RUN_ID="mine", LAB_RESUME="auto"), MODE)
    (tmp_path / "mine" / ".run").touch()
    assert refused(tmp_path, LAB_RUN_ID="mine") == [
        f"LAB_RUN_ID='mine' exists already in {tmp_path}: choose another or remove it"
    ]


def test_a_missing_checkpoint_is_refused_with_all_other_faults(tmp_path: Path) -> None:
    variant, absent = refused(tmp_path, LAB_VARIANT="rign", LAB_RESUME="absent")
    assert "'rign' is not a variant" in variant
    assert absent.startswith("LAB_RESUME='absent': absent does not exist")


@pytest.mark.parametrize("mode", ["comm", "train"])
@pytest.mark.parametrize("environ", [{"LAB_CHECKPOINT_EVERY": "5"}, {"LAB_RESUME": "a"}])
def test_a_mode_that_trains_nothing_saves_nothing(tmp_path: Path, mode: str, environ: dict[str, str]) -> None:
    ((name, value),) = environ.items()
    assert refused(tmp_path, load(mode), RUN_MODE=mode, **environ)[0] == (
        f"{name}={value}: {mode} trains nothing that could be saved, modes with checkpoints: cp, dp, fsdp, mesh, moe, pp, tp"
    )


def test_a_continued_run_is_repeated_from_the_start(tmp_path: Path) -> None:
    cluster = SimpleNamespace(rank=0, run_id="mine", world_size=1)
    for resume, repeated in (("auto", False), (str(tmp_path), True)):
        config = config_of(LAB_RESUME=resume, LAB_RUN_ID="mine", LAB_STEPS="9")
        start = start_record(config, cluster, MODE)  # type: ignore[arg-type]
        assert start.repeat["LAB_STEPS"] == "9" and ("LAB_RESUME" in start.repeat) == repeated


def test_the_start_record_names_the_injected_bug() -> None:
    cluster = SimpleNamespace(rank=0, run_id="mine", world_size=1)
    made = start_record(config_of(LAB_BUG="lost_shard"), cluster, MODE)  # type: ignore[arg-type]
    assert made.says_claims  # else a missing check would go unnoticed
    assert made.mistake == {"name": "lost_shard", "what": "a shard is lost", "check": "gradients"}
    assert start_record(config_of(), cluster, MODE).mistake == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        *((each, f"LAB_RUNS_DIR='{each}' cannot be written by user")
          for each in ("/proc", "/sys", "/proc/self/none", "/dev/zero", "/dev/null/runs")),
        *((each, "is too long for the names of files in it") for each in ("x" * 300, "x/" * 3000, "/tmp/" + "x" * 256)),
        *((each, "cannot be written") for each in ("{}/file/runs", "{}/loop", "{}/gone")),
        ("{}/kept", "must be a link to the newest run: rename it or remove it"),
    ],
)  # fmt: skip
def test_a_runs_folder_that_cannot_be_written_is_refused(tmp_path: Path, folder: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "kept" / "latest").mkdir(parents=True)
    (fault,) = unwritable(config_of(LAB_RUNS_DIR=folder.format(tmp_path)))
    assert words in fault
    assert len(fault) < 300


def test_checking_a_folder_leaves_nothing_in_it(tmp_path: Path) -> None:
    assert unwritable(config_of(LAB_RUNS_DIR=str(tmp_path))) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_run_has_locked_is_refused(tmp_path: Path) -> None:
    first, second = (SimpleNamespace(token=token, run_id="mine") for token in ("a", "b"))
    config = config_of(LAB_RUNS_DIR=str(tmp_path))
    lock_folder(tmp_path / "mine", first, config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="LAB_RUN_ID='mine' is used by another run"):
        lock_folder(tmp_path / "mine", second, config)  # type: ignore[arg-type]


def test_the_version_is_a_hash_of_the_sources() -> None:
    config = config_of()
    assert source_version(config) == source_version(config)
    assert len(source_version(config)) == 12


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU and rank 0 sees none"):
        pick_device(config_of(LAB_BACKEND=backend, LAB_DEVICE="cuda"))


def test_each_rank_picks_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    picked: list[int] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", picked.append)
    shared = config_of(RANK="3", LAB_DEVICE="cuda")
    assert pick_device(shared).index == 1  # gloo ranks share: 3 modulo 2
    assert pick_device(config_of(RANK="3", LOCAL_RANK="0", LAB_BACKEND="nccl")).index == 0
    assert picked == [1, 0]
    assert pick_device(config_of(RANK="3", LAB_BACKEND="nccl")).index == 1  # without LOCAL_RANK: 3 modulo 2
    with monkeypatch.context() as composed:
        composed.setenv("RANKS_ON_HOST", "4")
        with pytest.raises(ConfigError, match=r"rank 3 has number 3 on its machine, .* which has 2 GPUs"):
            pick_device(config_of(RANK="3", LAB_BACKEND="nccl"))
    with pytest.raises(
        ConfigError, match=r"rank 3 has number 2 on its machine, .* which has 2 GPUs, and NCCL needs a GPU per rank"
    ):
        pick_device(config_of(RANK="3", LOCAL_RANK="2", LAB_BACKEND="nccl"))


def test_a_rank_picks_the_only_card_that_its_engine_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda card: None)
    third = config_of(RANK="3", LOCAL_RANK="3", LAB_BACKEND="nccl")
    assert pick_device(third, "Slurm: rank 3 by SLURM_PROCID").index == 0
    with pytest.raises(ConfigError, match="which has 1 GPU, and NCCL needs a GPU per rank: start at most 1 rank"):
        pick_device(third)  # all ranks of the launcher see the same card


def test_two_ranks_on_one_card_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="GPU-a")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    device, config = torch.device("cuda", 0), config_of(RANK="0", LAB_BACKEND="nccl", WORLD_SIZE="3")
    apart: Any = SimpleNamespace(everyone=lambda what, mine: [mine, "GPU-b", "GPU-c"])
    check_cards(config, device, apart)
    shared: Any = SimpleNamespace(everyone=lambda what, mine: [mine, "GPU-b", mine])
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 share one GPU \(GPU-a\); 3 ranks have 2 GPUs"):
        check_cards(config, device, shared)
    check_cards(config_of(RANK="0", WORLD_SIZE="3", LAB_DEVICE="cuda"), device, shared)  # gloo's ranks may share


@pytest.mark.parametrize("variables", [{"LAB_BACKEND": "nccl"}, {"LAB_DEVICE": "cuda"}])
def test_settings_that_slow_the_cpu_are_refused_on_a_gpu(tmp_path: Path, variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"LAB_SLOW_RANK='0:0.5' slows a rank by its CPU time"):
        config_of(LAB_SLOW_RANK="0:0.5", **variables)
    asleep = config_of(RUN_MODE="pp", LAB_SLEEP_MS="30", LAB_RUNS_DIR=str(tmp_path), **variables)
    assert asleep.device == "cuda"
    with pytest.raises(ConfigError, match="LAB_SLEEP_MS=30 pretends compute by sleeping on the CPU"):
        refuse(asleep, MODE)


NAPS = '''"""Twelve naps."""
import time
from distlab.contract import Instead, Mistake, Mode

def run(lab, asleep=0):
    with lab.work.of(12, "naps"):
        for nap in range(12):
            lab.at(nap, "a nap")
            time.sleep(0.3)
            lab.work.advance()
    lab.check("awake", asleep, 0)

MODE = Mode(run=run, mistakes={"overslept": Mistake("nobody wakes up", "awake", Instead(run={"asleep": 1}))})
'''
# Progress lines every second instead of every ten; ranks are forked from this process.
EVERY_SECOND = """
import sys
from distlab.cli.run import main
from distlab.lab.report import progress
progress.EVERY_S = 1.0
sys.exit(main([]))
"""


def test_a_log_shows_the_bug_the_progress_and_the_check_that_failed(tmp_path: Path) -> None:
    (tmp_path / "naps.py").write_text(NAPS)
    settings = {"RUN_MODE": str(tmp_path / "naps.py"), "WORLD_SIZE": "2", "LAB_BUG": "overslept"}
    environ = clean(LAB_RUNS_DIR=str(tmp_path / "runs"), **settings)
    done = ended_warm("-c", [EVERY_SECOND], environ=environ, timeout_s=100)
    assert done.returncode == 1, done.stdout
    printed = (tmp_path / "runs" / "latest" / "rank0.log").read_text().splitlines()
    whole = " ".join(" ".join(printed).split())
    assert whole.startswith("bug LAB_BUG=overslept: nobody wakes up; the check that catches it: awake")
    assert (
        "FAIL 1 of 1 checks failed: awake" in whole and "LAB_BUG=overslept: nobody wakes up; caught by awake" in whole
    )
    progress_lines = [line for line in printed if line.startswith("working ")]
    assert any(
        re.fullmatch(r"working    a nap \(\d+ of 12 naps\), \d+ s, about \d+ s left", line) for line in progress_lines
    )
    assert whole.count("nobody wakes up") == 2
