"""A run is repeatable: equal settings give bitwise equal losses, another seed gives others."""

from pathlib import Path

from distlab.lab.report.records import Losses, select
from tests.labs import run_experiment
from tests.warm_ranks import Ranks


def losses(ranks: Ranks, folder: Path, **environ: str) -> dict[str, list[float]]:
    _, records = run_experiment(ranks, 3, folder, RUN_MODE="dp", LAB_BATCH="7", LAB_DEPTH="1", **environ)
    return {loss.variant: loss.numbers for _, loss in select(records, Losses)}


def test_equal_settings_give_bitwise_equal_losses(ranks: Ranks, tmp_path: Path) -> None:
    first, second = (losses(ranks, tmp_path / name) for name in ("first", "second"))
    assert set(first) == {"one process", "per_parameter", "flat", "bucketed", "ring", "ddp"}
    assert first == second


def test_another_seed_gives_other_losses(ranks: Ranks, tmp_path: Path) -> None:
    first, second = (losses(ranks, tmp_path / seed, LAB_SEED=seed, LAB_VARIANT="flat") for seed in ("1", "2"))
    assert first["flat"] != second["flat"]
