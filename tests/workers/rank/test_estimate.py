"""What a run takes, by formula: the parameters that the model has, and no machine's worth of what cannot be."""

import time
from types import SimpleNamespace

import pytest

from workers.config import Config
from workers.config.values import modes
from workers.rank import estimate as estimates
from workers.rank.estimate import estimate, num_parameters, ranks_here, rooms, too_large, too_long
from workers.rank.modes import load
from workers.workload.model import outline

GIB = 2.0**30


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"LAB_TIE": "1"},
        {"LAB_WIDTH": "48", "LAB_DEPTH": "3", "LAB_SEQ": "16"},
        {"LAB_MODEL": "mlp", "LAB_WIDTH": "40"},
        {"LAB_MODEL": "line"},
    ],
)
def test_parameters_are_those_of_the_model(sizes: dict[str, str]) -> None:
    config = Config.read(sizes)
    assert num_parameters(config) == outline(config).num_parameters()


def test_it_says_what_was_measured() -> None:
    """2.91 GB held two ranks at their peak, anonymous memory alone, beside which only mapped files stood."""
    config = Config.read({"LAB_WIDTH": "384", "LAB_STEPS": "4", "WORLD_SIZE": "2", "LAB_VARIANT": "flat,ddp"})
    assert 2.91e9 / 1.5 < estimate(config, load("dp"), 2).nbytes < 2.91e9 * 1.5


@pytest.mark.parametrize(
    ("sizes", "lower"),
    [
        ({"LAB_DEPTH": "1000000000"}, "lower LAB_WIDTH, LAB_DEPTH or the number of variants"),
        ({"LAB_WIDTH": "1000000000"}, "lower LAB_WIDTH, LAB_DEPTH or the number of variants"),
        ({"LAB_BATCH": "1000000000"}, "lower LAB_BATCH, LAB_SEQ, LAB_WIDTH or LAB_DEPTH"),
        ({"LAB_SEQ": "1000000000"}, "lower LAB_BATCH, LAB_SEQ, LAB_WIDTH or LAB_DEPTH"),
        ({"LAB_STEPS": "1000000000"}, "lower LAB_STEPS"),
        ({"LAB_MODEL": "line", "LAB_BATCH": "1000000000"}, "lower LAB_BATCH or LAB_SEQ"),
    ],
)
def test_what_no_machine_holds_is_refused_at_once(sizes: dict[str, str], lower: str) -> None:
    for mode in ("dp", "fsdp", "server"):
        config, lesson = Config.read({"RUN_MODE": mode} | sizes), load(mode)
        started = time.monotonic()
        (fault,) = too_large(config, lesson)
        assert time.monotonic() - started < 1.0
        assert fault.endswith(lower)
        assert fault.startswith("4 ranks of these settings need about ")


def test_what_a_mode_trains_beside_the_model_is_foretold_too() -> None:
    few, many = (
        Config.read({"RUN_MODE": "moe", "LAB_WIDTH": "256", "LAB_TOP_K": "1", "LAB_EXPERTS": number})
        for number in ("1", "4096")
    )
    assert too_large(few, load("moe")) == []
    (fault,) = too_large(many, load("moe"))
    assert fault.endswith("lower LAB_WIDTH, LAB_DEPTH or the number of variants")


def test_what_this_estimate_is_unsure_of_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, mode = Config.read({}), load("dp")
    needed = estimate(config, mode, 4).nbytes
    for there, refused in ((needed, False), (needed / 1.4, False), (needed / 1.6, True)):
        monkeypatch.setattr(estimates, "rooms", lambda _, there=there: [(4, there)])
        assert bool(too_large(config, mode)) == refused


def test_of_a_sharded_model_each_rank_holds_a_part() -> None:
    config = Config.read({"LAB_WIDTH": "1024", "LAB_PROOF": "0", "LAB_OPTIMIZER": "adamw", "LAB_VARIANT": "zero3,flat"})
    assert estimate(config, load("fsdp"), 4).held["the model"] < estimate(config, load("dp"), 4).held["the model"] / 1.5


@pytest.mark.parametrize("mode", modes())
def test_defaults_fit_into_a_laptop_and_an_hour(mode: str) -> None:
    config, lesson = Config.read({"RUN_MODE": mode, "WORLD_SIZE": "8"}), load(mode)
    assert estimate(config, lesson, 8).nbytes < 8 * GIB
    assert too_long(config, lesson) == []


def test_beyond_an_hour_a_run_is_told_and_not_refused() -> None:
    config = Config.read({"LAB_STEPS": "200000", "LAB_VARIANT": "flat"})
    (line,) = too_long(config, load("dp"))
    assert line.startswith("these settings may take about ")
    assert too_large(config, load("dp")) == []


def test_a_machine_holds_the_ranks_of_all_containers_and_a_container_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.read({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "worker0"})
    monkeypatch.setattr(estimates, "free_bytes", lambda: 8 * GIB)
    assert rooms(config)[-1] == (1, 8 * GIB)
    monkeypatch.setenv("RANKS_ON_HOST", "4")
    monkeypatch.setattr(estimates, "ContainerMemory", lambda: SimpleNamespace(limit_bytes=int(GIB)))
    assert rooms(config) == [(1, GIB), (4, 8 * GIB)]


def test_ranks_that_share_this_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "4"}
    assert ranks_here(Config.read({"WORLD_SIZE": "3"})) == 3
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "127.0.0.1"})) == 4
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "worker0"})) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_here(Config.read(rank | {"MASTER_ADDR": "worker0"})) == 2
