"""Settings that cannot run are refused before the ranks join, with all reasons at once."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from distlab.contract import Mode, Variant
from distlab.lab.cluster.control_plane import Exchange
from distlab.lab.config import Config, ConfigError
from distlab.lab.config.settings import modes
from distlab.lab.rank import preflight
from distlab.lab.rank.mode_loader import load
from distlab.lab.rank.preflight import (
    find_separate_disks,
    memories,
    needed_bytes,
    ranks_here,
    refuse,
    seen_by,
    warnings,
)
from distlab.lab.report import run_folder

UNTIMED = ("comm", "elastic", "train", "largebatch")


def refused(mode: str, **environ: str) -> list[str]:
    """Return the reasons why these settings are refused; empty if they are accepted."""
    try:
        refuse(Config.read({"RUN_MODE": mode} | environ), load(mode))
    except ConfigError as error:
        return error.faults
    return []


@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize("world_size", ["1", "3", "8"])
def test_defaults_are_never_refused(mode: str, world_size: str) -> None:
    assert refused(mode, WORLD_SIZE=world_size) == []


SAVING = ("cp", "dp", "fsdp", "mesh", "moe", "pp", "tp")
WHOLE_LAYERS = ("dp", "fsdp", "mesh")
SETTINGS = [  # settings, the modes that accept them, and the error of the others
    ({"LAB_SLOW_RANK": "1:0.5"}, set(modes()) - set(UNTIMED), "LAB_SLOW_RANK='1:0.5' slows a rank in the timed training"),
    (
        {"LAB_RECOMPUTE": "1"}, WHOLE_LAYERS,
        "LAB_RECOMPUTE=1 needs ranks that run whole layers, as {mode} does not, allowed: dp, fsdp, mesh",
    ),
    ({"LAB_CHECKPOINT_EVERY": "5"}, SAVING, "LAB_CHECKPOINT_EVERY=5: {mode} "),
]  # fmt: skip


@pytest.mark.parametrize("mode", modes())
def test_a_setting_without_effect_in_a_mode_is_refused(mode: str, tmp_path: Path) -> None:
    for settings, done_by, words in SETTINGS:
        found = refused(mode, LAB_RUNS_DIR=str(tmp_path), **settings)
        assert len(found) == (mode not in done_by), found
        assert all(sentence.startswith(words.format(mode=mode)) for sentence in found)
        if "LAB_CHECKPOINT_EVERY" in settings:
            assert all(sentence.endswith(f", modes with checkpoints: {', '.join(SAVING)}") for sentence in found)


def test_excluded_variants_are_refused_only_if_requested() -> None:
    mode = Mode(
        variants=(Variant("one"), Variant("two")), cannot=lambda config: {"two": f"LAB_SEED={config.seed} is odd"}
    )
    refuse(Config.read({}), mode)
    with pytest.raises(ConfigError) as error:
        refuse(Config.read({"LAB_VARIANT": "one,two"}), mode)
    assert error.value.faults == ["LAB_VARIANT='two' cannot run: LAB_SEED=1 is odd"]


def test_invalid_sizes_are_reported_before_their_consequences() -> None:
    found = refused("dp", LAB_HEADS="7", LAB_BUG="hook_race", LAB_VARIANT="per_parameter")
    assert found == ["LAB_WIDTH=128 is not a multiple of LAB_HEADS=7: heads share the width equally"]
    found = refused("dp", LAB_BUG="hook_race", LAB_VARIANT="per_parameter")
    assert found == ["LAB_BUG=hook_race cannot be detected with these variants: it takes bucketed or ring"]


# The memory of a run by formula, and the warning if it exceeds the free memory.

GIB = 2.0**30


def test_the_estimate_is_near_a_measured_run() -> None:
    """Two ranks used 2.91 GB of anonymous memory at their peak."""
    config = Config.read(
        {"LAB_WIDTH": "384", "LAB_DEPTH": "8", "LAB_STEPS": "4", "WORLD_SIZE": "2", "LAB_VARIANT": "flat,ddp"}
    )
    assert 2.91e9 / 1.5 < needed_bytes(config, load("dp"), 2) < 2.91e9 * 1.5


@pytest.mark.parametrize("mode", ["dp", "fsdp", "server"])
@pytest.mark.parametrize("name", ["LAB_WIDTH", "LAB_BATCH", "LAB_SEQ"])
def test_a_run_too_large_for_memory_is_only_warned_of(mode: str, name: str) -> None:
    config, lesson = Config.read({"RUN_MODE": mode, name: "1000000"}), load(mode)
    refuse(config, lesson)
    (memory,) = warnings(config, lesson)
    assert memory.startswith("4 ranks of these settings may need about ")
    assert memory.endswith(" are free: lower LAB_WIDTH, LAB_DEPTH, LAB_BATCH, LAB_SEQ or the number of variants")


def test_the_estimate_includes_a_modes_own_parameters() -> None:
    few, many = (
        Config.read({"RUN_MODE": "moe", "LAB_WIDTH": "256", "LAB_TOP_K": "1", "LAB_EXPERTS": number})
        for number in ("1", "4096")
    )
    assert needed_bytes(many, load("moe"), 4) > 100 * needed_bytes(few, load("moe"), 4)


def test_a_warning_appears_only_if_memory_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    config, mode = Config.read({}), load("dp")
    needed = needed_bytes(config, mode, 4)
    for there, warned in ((1.01 * needed, False), (0.99 * needed, True)):
        monkeypatch.setattr(preflight, "memories", lambda _, there=there: [(4, there)])
        assert bool(warnings(config, mode)) == warned


def test_a_sharded_model_needs_less_memory_per_rank() -> None:
    config = Config.read({"LAB_WIDTH": "1024", "LAB_PROOF": "0", "LAB_OPTIMIZER": "adamw", "LAB_VARIANT": "zero3,flat"})
    assert needed_bytes(config, load("fsdp"), 4) < needed_bytes(config, load("dp"), 4) / 1.5


@pytest.mark.parametrize("mode", modes())
def test_defaults_fit_into_a_laptop(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "memories", lambda _: [(8, 8 * GIB)])
    assert warnings(Config.read({"RUN_MODE": mode, "WORLD_SIZE": "8"}), load(mode)) == []


def test_a_machine_has_all_ranks_and_a_container_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.read({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "worker0"})
    monkeypatch.setattr(preflight, "free_bytes", lambda: 8 * GIB)
    assert memories(config)[-1] == (1, 8 * GIB)
    monkeypatch.setenv("RANKS_ON_HOST", "4")
    monkeypatch.setattr(preflight, "ContainerMemory", lambda: SimpleNamespace(limit_bytes=int(GIB)))
    assert memories(config) == [(1, GIB), (4, 8 * GIB)]


def test_ranks_that_share_this_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "4"}
    assert ranks_here(Config.read({"WORLD_SIZE": "3"})) == 3
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "127.0.0.1"})) == 4
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "worker0"})) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "worker0"})) == 2


# Machines without a shared disk: reported, or refused if checkpoints need one, before anything is written.

TOKEN = "0123456789abcdef" * 2


def disks_reported(folders: list[Path], config: Config) -> list[list[str]]:
    """Return for each rank, with its own folder, the sentence and all hosts, or the faults."""
    store = dist.HashStore()
    exchanges = [Exchange(store, rank, len(folders), timeout_s=10) for rank in range(len(folders))]

    def one(rank: int) -> list[str]:
        try:
            found = find_separate_disks(exchanges[rank], folders[rank], TOKEN, config)
            return [found.sentence, *found.hosts] if found else []
        except ConfigError as error:
            return error.faults

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(one, range(len(folders))))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The folders of three ranks, the last on another machine."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in ("here", "here", "there")]


def test_a_shared_folder_is_not_reported_and_stays_empty(tmp_path: Path) -> None:
    assert disks_reported([tmp_path] * 3, Config.read({"LAB_CHECKPOINT_EVERY": "2"})) == [[]] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{"LAB_CHECKPOINT_EVERY": "2"}, {"LAB_RESUME": "runs/mine"}])
def test_checkpoints_are_refused_on_every_rank(folders: list[Path], settings: dict[str, str]) -> None:
    found = disks_reported(folders, Config.read(settings))
    ((name, value),) = settings.items()
    assert found[0] == found[1] == found[2]
    (fault,) = found[0]
    assert fault.startswith("LAB_RUNS_DIR='runs' is not the same folder on all machines: rank 2 on ")
    assert fault.endswith(f"cannot see rank 0's, and {name}={value} needs a folder on a shared disk")


def test_a_refused_run_removes_its_folder_unless_it_has_a_run(folders: list[Path]) -> None:
    for folder in set(folders):
        (folder / run_folder.FILE).touch()
    (folders[2] / "run.json").touch()
    disks_reported(folders, Config.read({"LAB_CHECKPOINT_EVERY": "2"}))
    assert not folders[0].exists()
    assert sorted(path.name for path in folders[2].iterdir()) == [run_folder.FILE, "run.json"]


def test_without_checkpoints_separate_disks_are_reported(folders: list[Path]) -> None:
    found = disks_reported(folders, Config.read({}))
    ((line, *hosts), *others) = found
    assert others == [[line, *hosts]] * 2
    assert hosts == [socket.gethostname()] * 3
    assert line.startswith("not shared with rank 2 on ") and "their logs stay there" in line


def test_the_mark_of_an_earlier_attempt_is_ignored(folders: list[Path]) -> None:
    (folders[2] / ".seen-ffffffffffffffff").touch()
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda rank: seen_by(Exchange(store, rank, 3, timeout_s=10), folders[rank], TOKEN), range(3))
        )
    assert [unseen for _, unseen in found] == [[2]] * 3
