"""Large batches: the whole experiment at odd sizes, what each k sees, when a recipe has broken down, and what is refused."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from experiments import largebatch
from experiments.largebatch.claims import distinct, multiples, sized
from experiments.largebatch.findings import broken, cell, widest_spread
from experiments.largebatch.proof import K, apart
from experiments.largebatch.recipes import RECIPES
from experiments.largebatch.samples import Stream
from tests.labs import TINY, failed, run_experiment
from tests.ranks import Ranks
from workers.config import Config
from workers.report import records
from workers.workload.model import build_model

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int = 3, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "largebatch", "WORLD_SIZE": str(world_size)} | settings)


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
    config = sized(config_of(), "mlp")
    assert [list(distinct(config, k)) for k in (1, 2)] == [["unscaled", "lars", "lamb"], list(RECIPES)]


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


def test_small_steps_add_up_and_wrong_rates_do_not() -> None:
    config = sized(config_of(), "mlp")
    model = build_model(config, 1).double()
    stream = Stream(config, 1, K, torch.device("cpu"), torch.float64)
    assert apart(model, stream, config, 1e-3) / apart(model, stream, config, 5e-4) == pytest.approx(4, abs=0.1)


def test_the_breakdown_is_the_first_k_above_the_spread() -> None:
    base = [1.0, 1.1, 0.9]
    spread = widest_spread({"wide": {1: base}, "close by chance": {1: [3.0, 3.0, 3.01]}})
    assert spread == pytest.approx(0.2)  # so up to 1.6
    assert broken({1: base, 2: [1.59] * 3, 4: [1.61] * 3, 8: [1.0] * 3}, spread) == "k = 4"
    assert broken({1: base, 2: [1.2] * 3}, spread) == "none up to 2"
    assert broken({1: base, 2: [1.0, 1.0, math.nan]}, spread) == "k = 2"
    assert cell([1.0, math.inf], 5.0) == cell([6.0], 5.0) == "diverged"
    assert cell(base, 5.0) == "1 (0.9 to 1.1)"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_MODEL": "line"}, "allowed: mlp, gpt"),
        ({"LAB_OPTIMIZER": "adamw"}, "an optimizer of its own"),
        ({"LAB_CLIP": "1"}, "LAB_CLIP=1 is no part"),
        ({"LAB_CHECKPOINT_EVERY": "2"}, "LAB_CHECKPOINT_EVERY=2"),
        ({"LAB_BATCH": "2"}, "smaller than WORLD_SIZE=3"),
        ({"LAB_BUG": "lr_unscaled", "LAB_PROOF": "0"}, "LAB_PROOF=0"),
        ({"LAB_BUG": "lr_unscaled", "LAB_VARIANT": "sqrt,lars"}, "linear or warmup"),
    ],
)
def test_what_cannot_be_run_or_seen_is_refused(settings: dict[str, str], words: str) -> None:
    (sentence,) = largebatch.refuse(config_of(3, **settings))
    assert words in sentence
