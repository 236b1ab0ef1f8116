"""What a run takes, by formula, and the warning where that is more than is there."""

from types import SimpleNamespace

import pytest

from distlab.config import Config
from distlab.config.settings import modes
from distlab.rank import preflight
from distlab.rank.mode_loader import load
from distlab.rank.preflight import needed_bytes, ranks_here, refuse, rooms, run_seconds, warnings

GIB = 2.0**30


def test_it_says_what_was_measured() -> None:
    """2.91 GB held two ranks at their peak, anonymous memory alone, beside which only mapped files stood."""
    config = Config.read({"LAB_WIDTH": "384", "LAB_STEPS": "4", "WORLD_SIZE": "2", "LAB_VARIANT": "flat,ddp"})
    assert 2.91e9 / 1.5 < needed_bytes(config, load("dp"), 2) < 2.91e9 * 1.5


@pytest.mark.parametrize("mode", ["dp", "fsdp", "server"])
@pytest.mark.parametrize("name", ["LAB_WIDTH", "LAB_BATCH", "LAB_SEQ"])
def test_a_run_that_no_machine_holds_is_warned_of_and_not_refused(mode: str, name: str) -> None:
    config, lesson = Config.read({"RUN_MODE": mode, name: "1000000"}), load(mode)
    refuse(config, lesson)
    memory, time = warnings(config, lesson)
    assert memory.startswith("4 ranks of these settings may need about ")
    assert memory.endswith(" are free: lower LAB_WIDTH, LAB_DEPTH, LAB_BATCH, LAB_SEQ or the number of variants")
    assert time.startswith("these settings may take about ")


def test_what_a_mode_trains_beside_the_model_counts_too() -> None:
    few, many = (
        Config.read({"RUN_MODE": "moe", "LAB_WIDTH": "256", "LAB_TOP_K": "1", "LAB_EXPERTS": number})
        for number in ("1", "4096")
    )
    assert needed_bytes(many, load("moe"), 4) > 100 * needed_bytes(few, load("moe"), 4)


def test_there_is_a_warning_only_where_there_is_less_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    config, mode = Config.read({}), load("dp")
    needed = needed_bytes(config, mode, 4)
    for there, warned in ((1.01 * needed, False), (0.99 * needed, True)):
        monkeypatch.setattr(preflight, "rooms", lambda _, there=there: [(4, there)])
        assert bool(warnings(config, mode)) == warned


def test_of_a_sharded_model_each_rank_holds_a_part() -> None:
    config = Config.read({"LAB_WIDTH": "1024", "LAB_PROOF": "0", "LAB_OPTIMIZER": "adamw", "LAB_VARIANT": "zero3,flat"})
    assert needed_bytes(config, load("fsdp"), 4) < needed_bytes(config, load("dp"), 4) / 1.5


@pytest.mark.parametrize("mode", modes())
def test_defaults_fit_into_a_laptop_and_an_hour(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "rooms", lambda _: [(8, 8 * GIB)])
    assert warnings(Config.read({"RUN_MODE": mode, "WORLD_SIZE": "8"}), load(mode)) == []


def test_there_is_a_warning_beyond_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "rooms", lambda _: [(4, 1e6 * GIB)])
    for steps in ("200000", "1000000000"):
        (line,) = warnings(Config.read({"LAB_STEPS": steps, "LAB_VARIANT": "flat"}), load("dp"))
        assert line.startswith("these settings may take about ")
    assert run_seconds(Config.read({"RUN_MODE": "comm"}), load("comm"), 4) == 0


def test_a_machine_holds_the_ranks_of_all_containers_and_a_container_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.read({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "worker0"})
    monkeypatch.setattr(preflight, "free_bytes", lambda: 8 * GIB)
    assert rooms(config)[-1] == (1, 8 * GIB)
    monkeypatch.setenv("RANKS_ON_HOST", "4")
    monkeypatch.setattr(preflight, "ContainerMemory", lambda: SimpleNamespace(limit_bytes=int(GIB)))
    assert rooms(config) == [(1, GIB), (4, 8 * GIB)]


def test_ranks_that_share_this_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "4"}
    assert ranks_here(Config.read({"WORLD_SIZE": "3"})) == 3
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "127.0.0.1"})) == 4
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "worker0"})) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "worker0"})) == 2
