"""Large batches: the whole experiment at odd sizes, what each k sees, when a recipe has broken down, and what is
refused."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from experiments.largebatch import MODE, RECIPES, SMALL, apart
from experiments.largebatch.findings import broken, cell, rule, widest_spread
from experiments.largebatch.proof import K
from experiments.largebatch.recipes import base_rate, distinct
from experiments.largebatch.samples import Stream
from experiments.largebatch.sweep import multiples, sized
from tests.labs import TINY, failed, run_experiment
from tests.ranks import Ranks
from workers.config import Config, ConfigError
from workers.parallel import rates
from workers.rank.modes import load
from workers.rank.refusals import refuse
from workers.report import records
from workers.workload.model import build_model

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int = 3, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "largebatch", "WORLD_SIZE": str(world_size)} | settings)


def refused(config: Config) -> list[str]:
    with pytest.raises(ConfigError) as error:
        refuse(config, MODE)
    return error.value.faults


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (3, {"LAB_BATCH": "13", "LAB_MICROBATCHES": "3", "LAB_MODEL": "gpt", "LAB_VARIANT": "warmup,lars,lamb"}),
        (1, {"LAB_MODEL": "mlp", "LAB_STEPS": "8", "LAB_DTYPE": "bfloat16"}),
    ],
    ids=["uneven", "alone"],
)
def test_a_run_holds(ranks: Ranks, tmp_path: Path, world_size: int, settings: dict[str, str]) -> None:
    run, by_rank = run_experiment(ranks, world_size, tmp_path, **({"RUN_MODE": "largebatch"} | settings))
    assert failed(run) == set()
    model, steps = settings["LAB_MODEL"], int(settings.get("LAB_STEPS", 4))
    names = {(claim["variant"], claim["name"]) for claim in run["checks"] + run["comparisons"]}
    wanted = settings.get("LAB_VARIANT", ",".join(RECIPES)).split(",")
    assert {(f"{model} {name}", check) for name in wanted for check in ("gradients", "weights")} <= names
    assert {("", "effective batch"), (model, "replicas"), (model, "wire bytes")} <= names
    assert (f"{model} warmup", "learning rate") in names
    table = next(r for r in by_rank[0] if isinstance(r, records.Table) and "held-out" in r.title)
    assert [row[0] for row in table.rows] == wanted
    assert len(table.columns) == 2 + len([k for k in (1, 2, 4, 8, 16, 32) if steps % k == 0])
    stated = [r.text for r in by_rank[0] if isinstance(r, records.Said) and r.heading == "batch"]
    assert len(stated) == len(table.columns) - 2
    if world_size == 3:
        assert stated[1].startswith("k = 2: 26 samples a step = 9 + 9 + 8")


def test_recipes_of_one_optimizer_are_one_run_at_the_base_batch(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"RUN_MODE": "largebatch", "LAB_MODEL": "mlp", "LAB_PROOF": "0"}
    _, by_rank = run_experiment(ranks, 2, tmp_path, **settings)
    table = next(r for r in by_rank[0] if isinstance(r, records.Table) and "held-out" in r.title)
    firsts = {row[0]: row[1] for row in table.rows}
    assert len({firsts[name] for name in ("unscaled", "sqrt", "linear", "warmup")}) == 1
    assert len(set(firsts.values())) == 3
    time = next(r for r in by_rank[0] if isinstance(r, records.Table) and r.title == "mlp: time")
    assert [row[time.columns.index("runs")] for row in time.rows] == [9, 18, 18]
    assert [list(distinct(RECIPES, k)) for k in (1, 2)] == [["unscaled", "lars", "lamb"], list(RECIPES)]


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_every_k_sees_the_same_samples_once(model: str) -> None:
    config = sized(config_of(LAB_STEPS="8", LAB_BATCH="7"), model)
    stream = Stream(config, 1, config.steps, torch.device("cpu"), torch.float32)
    for k in multiples(config):
        seen = Counter(
            place
            for step in range(8 // k)
            for rank in range(3)
            for place in stream.places(k, step, rank, 3, uneven=True)
        )
        assert seen == Counter(range(8 * 7))
        dealt = [part for rank in range(3) for part in stream.dealt(k, 0, rank, 3)]
        assert torch.equal(torch.cat([part.inputs for part in dealt]), stream.inputs[: 7 * k])
        assert sum(part.targets.numel() * part.share for part in dealt) == pytest.approx(1)


def test_a_text_is_judged_by_samples_that_it_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("0123456789")  # windows of 3 and the next: 0 to 3, 3 to 6, 6 to 9
    settings = {"LAB_MODEL": "gpt", "LAB_TEXT": str(tmp_path / "text"), "LAB_SEQ": "3"}
    stream = Stream(config_of(3, **settings), 1, 4, torch.device("cpu"), torch.float32)
    held = {bytes(row) for row in stream.held_out.inputs.tolist()}
    assert len(held) == 1
    assert {bytes(row) for row in stream.inputs.tolist()} == {b"012", b"345", b"678"} - held
    (sentence,) = refused(config_of(3, **(settings | {"LAB_SEQ": "5"})))
    assert "the text holds one sample of LAB_SEQ=5 bytes" in sentence


@pytest.mark.parametrize(("model", "depth"), [("mlp", "2"), ("gpt", "8")])
def test_small_steps_add_up_and_wrong_rates_do_not(monkeypatch: pytest.MonkeyPatch, model: str, depth: str) -> None:
    """A deep model bends its loss more: at a rate of 1e-3 the gpt's ratio is 3.82, and the proof failed correct
    code."""
    config = sized(config_of(1, LAB_WIDTH="64", LAB_DEPTH=depth, LAB_BATCH="1"), model)
    dense = build_model(config, 1).double()
    stream = Stream(config, 1, K, torch.device("cpu"), torch.float64)

    def ratio() -> float:
        whole, half = (apart(dense, stream, config, rate) for rate in (SMALL, SMALL / 2))
        return whole / half

    assert ratio() == pytest.approx(4, abs=0.01)
    monkeypatch.setattr(rates, "linear", rates.sqrt)
    assert ratio() == pytest.approx(2, abs=0.01)  # now they part in first order


@pytest.mark.parametrize("rate", ["1", "20"])
def test_the_proof_holds_whatever_the_rate_of_the_sweep(ranks: Ranks, tmp_path: Path, rate: str) -> None:
    """A step that overshoots would make rounding errors grow, of which the code is not to blame: 1.1e-8 with a rate of
    1."""
    settings = {"RUN_MODE": "largebatch", "LAB_MODEL": "mlp", "LAB_LR": rate}
    run, _ = run_experiment(ranks, 2, tmp_path, **settings)
    assert failed(run) == set()
    assert run["proven"]


@pytest.mark.parametrize("rate", ["0.001", "20"])
def test_a_rate_that_is_not_scaled_is_seen_whatever_the_rate_of_the_sweep(
    ranks: Ranks, tmp_path: Path, rate: str
) -> None:
    settings = {"LAB_MODEL": "mlp", "LAB_BUG": "lr_unscaled", "LAB_VARIANT": "linear", "LAB_LR": rate}
    run, _ = run_experiment(ranks, 2, tmp_path, **({"RUN_MODE": "largebatch"} | settings))
    assert failed(run) == {"learning rate", "gradients", "weights"}
    measured = {claim["max_abs_diff"] for claim in run["checks"] if claim["name"] == "learning rate"}
    assert max(measured) == pytest.approx(1 - 1 / K)


BASE, UNTRAINED = [1.0, 1.1, 0.9], 5.0


def test_the_breakdown_is_the_first_k_above_the_spread() -> None:
    spread = widest_spread([{1: BASE}, {1: [3.0, 3.0, 3.01]}], UNTRAINED)  # the second is close by chance
    assert spread == pytest.approx(0.2)  # so up to 1.6
    assert broken({1: BASE, 2: [1.59] * 3, 4: [1.61] * 3, 8: [1.0] * 3}, spread, UNTRAINED) == "k = 4"
    assert broken({1: BASE, 2: [1.2] * 3}, spread, UNTRAINED) == "none up to 2"
    assert broken({1: BASE, 2: [1.0, 1.0, math.nan]}, spread, UNTRAINED) == "k = 2"
    assert broken({1: [4.0] * 3, 2: [5.1] * 3}, spread, UNTRAINED) == "k = 2"  # within the spread, and yet diverged
    assert cell([1.0, math.inf], UNTRAINED) == cell([6.0], UNTRAINED) == cell([math.nan], UNTRAINED) == "diverged"
    assert cell(BASE, UNTRAINED) == "1 (0.9 to 1.1)"
    assert "3 x 20 % above its own at k = 1" in rule(spread)


@pytest.mark.parametrize("diverged", [[math.nan] * 3, [1.0, 1.0, math.inf], [2.0, 30.0, 1.0]])
def test_a_recipe_that_diverged_at_the_base_batch_breaks_down_there_and_no_other_with_it(diverged: list[float]) -> None:
    spread = widest_spread([{1: diverged}, {1: BASE}], UNTRAINED)
    assert spread == pytest.approx(0.2)
    assert broken({1: diverged, 2: diverged}, spread, UNTRAINED) == "k = 1"
    assert broken({1: diverged, 2: [1.0] * 3}, spread, UNTRAINED) == "k = 1"
    assert broken({1: BASE, 2: [1.5] * 3}, spread, UNTRAINED) == "none up to 2"


def test_where_every_recipe_diverged_a_sentence_says_so() -> None:
    losses: dict[int, list[float]] = {1: [math.nan, 1.0, 1.0], 2: [1.0] * 3}
    spread = widest_spread([losses, {1: [6.0] * 3}], UNTRAINED)
    assert spread is None
    assert broken(losses, spread, UNTRAINED) == "k = 1"
    assert rule(spread).startswith("No recipe is below that at k = 1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_MODEL": "line"}, "allowed: mlp, gpt"),
        ({"LAB_OPTIMIZER": "adamw"}, "an optimizer of its own"),
        ({"LAB_CLIP": "1"}, "LAB_CLIP=1 is no part"),
        ({"LAB_BUCKET_MIB": "25"}, "LAB_BUCKET_MIB=25 is no part"),
        ({"LAB_LR": "0.1", "LAB_VARIANT": "lars,lamb"}, "LAB_LR=0.1 is the base rate of SGD"),
        ({"LAB_CHECKPOINT_EVERY": "2"}, "LAB_CHECKPOINT_EVERY=2"),
        ({"LAB_BATCH": "2"}, "smaller than WORLD_SIZE=3"),
        ({"LAB_BUG": "lr_unscaled", "LAB_PROOF": "0"}, "LAB_PROOF=0"),
        ({"LAB_BUG": "lr_unscaled", "LAB_VARIANT": "sqrt,lars"}, "linear or warmup"),
    ],
)
def test_what_cannot_be_run_or_seen_is_refused(settings: dict[str, str], words: str) -> None:
    (sentence,) = refused(config_of(3, **settings))
    assert words in sentence


def test_a_rate_is_no_fault_of_a_variant_that_does_not_exist() -> None:
    """That is told elsewhere."""
    assert MODE.refuse(config_of(3, LAB_LR="0.1", LAB_VARIANT="liner")) == []
    assert MODE.refuse(config_of(3, LAB_LR="0.1", LAB_VARIANT="lars,linear")) == []


def test_the_lesson_gives_the_base_rate_that_it_takes() -> None:
    assert f"LAB_LR is SGD's base rate; unset: {base_rate(config_of()):g}." in load("largebatch").idea
