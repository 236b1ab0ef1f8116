"""What no mode takes, or this one does not: refused before the ranks join, everything at once."""

from pathlib import Path

import pytest

from distlab.config import Config, ConfigError
from distlab.config.settings import modes
from distlab.contract import Mode, Variant
from distlab.rank.mode_loader import load
from distlab.rank.preflight import refuse

UNTIMED = ("comm", "elastic", "train", "largebatch")


def refused(mode: str, **environ: str) -> list[str]:
    """The sentences with which these settings are refused; none where they are not."""
    try:
        refuse(Config.read({"RUN_MODE": mode} | environ), load(mode))
    except ConfigError as error:
        return error.faults
    return []


@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize("world_size", ["1", "3", "8"])
def test_defaults_are_refused_nowhere(mode: str, world_size: str) -> None:
    assert refused(mode, WORLD_SIZE=world_size) == []


@pytest.mark.parametrize("mode", modes())
def test_a_trace_is_refused_where_none_would_be_written(mode: str) -> None:
    found = refused(mode, LAB_TRACE="1")
    assert len(found) == (mode in UNTIMED)
    if found:
        what = "LAB_TRACE=1 profiles a step of the timed training of each variant"
        assert (
            found[0]
            == f"{what}, and {mode} has none, allowed: compress, cp, dp, fsdp, mesh, moe, pp, precision, server, tp"
        )
    assert refused(mode, LAB_TRACE="0") == []


@pytest.mark.parametrize("mode", modes())
def test_a_slow_rank_is_refused_where_nothing_is_timed(mode: str) -> None:
    found = refused(mode, LAB_SLOW_RANK="1:0.5")
    assert len(found) == (mode in UNTIMED)
    assert all("LAB_SLOW_RANK='1:0.5' slows a rank in the timed training" in sentence for sentence in found)


@pytest.mark.parametrize("mode", modes())
def test_recomputation_is_refused_where_layers_are_not_whole(mode: str) -> None:
    found = refused(mode, LAB_RECOMPUTE="1")
    assert found == (
        []
        if mode in ("dp", "fsdp", "mesh")
        else [f"LAB_RECOMPUTE=1 is not possible in {mode}, allowed: dp, fsdp, mesh, whose ranks run whole layers"]
    )


@pytest.mark.parametrize("mode", modes())
def test_checkpoints_are_refused_where_none_are_made(mode: str, tmp_path: Path) -> None:
    found = refused(mode, LAB_CHECKPOINT_EVERY="5", LAB_RUNS_DIR=str(tmp_path))
    assert (found == []) == (mode in ("cp", "dp", "fsdp", "mesh", "moe", "pp", "tp"))
    for sentence in found:
        assert sentence.startswith(f"LAB_CHECKPOINT_EVERY=5: {mode} ")
        assert sentence.endswith("; checkpoints go with cp, dp, fsdp, mesh, moe, pp, tp")


def test_variants_that_these_settings_rule_out_are_refused_only_by_name() -> None:
    mode = Mode(
        variants=(Variant("one"), Variant("two")), cannot=lambda config: {"two": f"LAB_SEED={config.seed} is odd"}
    )
    refuse(Config.read({}), mode)
    with pytest.raises(ConfigError) as error:
        refuse(Config.read({"LAB_VARIANT": "one,two"}), mode)
    assert error.value.faults == ["LAB_VARIANT='two' cannot run: LAB_SEED=1 is odd"]


def test_sizes_that_make_no_model_are_told_before_what_follows_from_them() -> None:
    found = refused("dp", LAB_HEADS="7", LAB_BUG="hook_race", LAB_VARIANT="naive")
    assert found == ["LAB_WIDTH=128 is not a multiple of LAB_HEADS=7: heads share the width equally"]
    found = refused("dp", LAB_BUG="hook_race", LAB_VARIANT="naive")
    assert found == ["LAB_BUG=hook_race cannot be detected with these variants: it takes bucketed or ring"]
