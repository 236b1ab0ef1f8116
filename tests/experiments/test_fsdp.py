"""Whole fsdp runs at uneven sizes: proven, and as many bytes are sent and stored as predicted."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.experiments.fsdp import MODE
from distlab.experiments.fsdp.predictions import at_rest, published, units
from distlab.lab.config import Config
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import build_model, outline
from tests.labs import TINY, built, failed, run_experiment
from tests.warm_ranks import Ranks

OURS = ("dp", "zero3_blocking", "zero1", "zero2", "zero3")

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "fsdp", "WORLD_SIZE": str(world_size), "LAB_BATCH": "17"} | settings)


# Settings that could go wrong together: clipping, AdamW, fewer microbatches on a rank, tied ends, weights kept gathered.
ADAM, BY_HAND = {"LAB_OPTIMIZER": "adamw"}, {"LAB_MODEL": "mlp", "LAB_VARIANT": ",".join(OURS)}
CLIPPED = ADAM | {"LAB_CLIP": "0.05"}
MIXES: list[tuple[int, dict[str, str]]] = [
    (3, CLIPPED | {"LAB_MICROBATCHES": "2", "LAB_BATCH": "7", "LAB_TIE": "1", "LAB_DEPTH": "1"}),
    (2, BY_HAND | {"LAB_RESHARD": "0", "LAB_MICROBATCHES": "2"}),
    (1, CLIPPED),
    (4, ADAM | {"LAB_MODEL": "line", "LAB_VARIANT": "zero3"}),  # two parameters, so two ranks own none
    (3, ADAM | BY_HAND | {"LAB_DEPTH": "2", "LAB_DTYPE": "bfloat16"}),
    (8, {"LAB_BATCH": "17", "LAB_WIDTH": "20", "LAB_DEPTH": "1", "LAB_VARIANT": "zero2,zero3"}),
]


@pytest.mark.parametrize(("world_size", "settings"), MIXES, ids=["all", "kept", "alone", "line", "bfloat16", "eight"])
def test_a_run_passes(ranks: Ranks, tmp_path: Path, world_size: int, settings: dict[str, str]) -> None:
    run, _ = run_experiment(ranks, world_size, tmp_path, **({"RUN_MODE": "fsdp", "LAB_STEPS": "3"} | settings))
    assert failed(run) == set()
    names = {(claim["variant"], claim["name"]) for claim in run["checks"] + run["comparisons"]}
    proof = {"losses", "gradients", "weights"} | (
        {"optimizer state", "clipped gradients"} if "LAB_CLIP" in settings else set()
    )
    for name in set(OURS) & set(settings.get("LAB_VARIANT", ",".join(OURS)).split(",")):
        assert {(name, claim) for claim in proof | {"wire bytes", "calls", "rest bytes"}} <= names


def test_recomputation_lowers_the_peak_of_activations(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"RUN_MODE": "fsdp", "LAB_BATCH": "32", "LAB_DEPTH": "6", "LAB_STEPS": "2", "LAB_PROOF": "0"}
    activations: dict[tuple[str, str], int] = {}
    for recompute in ("1", "0"):
        (folder := tmp_path / recompute).mkdir()
        chosen = settings | {"LAB_RECOMPUTE": recompute, "LAB_VARIANT": "zero3_blocking,zero3"}
        run, _ = run_experiment(ranks, 2, folder, **chosen)
        assert failed(run) == set()
        activations |= {(each["name"], recompute): each["activation_bytes"][0] for each in run["variants"]}
    assert activations["zero3", "1"] < 0.5 * activations["zero3", "0"]
    assert activations["zero3_blocking", "0"] < 0.5 * activations["zero3", "0"]


# --- predictions ---


@pytest.mark.parametrize("world_size", range(1, 9))
def test_stored_bytes_follow_the_papers_formulas(world_size: int) -> None:
    config = config_of(world_size, LAB_OPTIMIZER="adamw", LAB_WIDTH="64", LAB_HEADS="4")
    total, n = outline(config).num_parameters(), world_size
    wanted = {
        "dp": 16,
        "zero3_blocking": 16 / n,
        "zero1": 8 + 8 / n,
        "zero2": 4 + 12 / n,
        "zero3": 16 / n,
        "fsdp2": 16 / n,
    }
    for name, bytes_per_parameter in wanted.items():
        for value in at_rest(config, name).value:
            assert value == pytest.approx(bytes_per_parameter * total, rel=0.01)
    half = config_of(world_size, LAB_OPTIMIZER="adamw", LAB_WIDTH="64", LAB_HEADS="4", LAB_DTYPE="bfloat16")
    wanted = {"zero3_blocking": 16 / n, "zero1": 4 + 12 / n, "zero2": 2 + 14 / n, "zero3": 16 / n}
    for name, bytes_per_parameter in wanted.items():
        assert at_rest(half, name).value[0] == pytest.approx(bytes_per_parameter * total, rel=0.01)


def test_the_published_table() -> None:
    _, _, rows = published()
    assert [row[1] for row in rows] == ["120", "31.4", "16.6", "1.88"]
    assert rows[0][2] == "112, 112, 112"  # the lesson's rule of thumb says 56


def test_sent_bytes_follow_the_papers_formulas() -> None:
    sent = {
        prediction.variant: prediction.value[0]
        for prediction in MODE.predict(config_of(4, LAB_WIDTH="64", LAB_HEADS="4"))
        if prediction.name == "wire bytes"
    }
    size = 4 * outline(config_of(4, LAB_WIDTH="64", LAB_HEADS="4")).num_parameters()
    assert sent["dp"] == pytest.approx(2 * 3 / 4 * size)
    assert sent["zero1"] == sent["zero2"] == pytest.approx(2 * 3 / 4 * size, rel=0.001)
    assert sent["zero3"] == pytest.approx(3 * 3 / 4 * size, rel=0.001)
    assert sent["zero3_blocking"] == pytest.approx(4 * 3 / 4 * size, rel=0.001)


@pytest.mark.parametrize(("reshard", "moves"), [("1", 4), ("0", 3)])
def test_fully_shard_sends_the_predicted_bytes(ranks: Ranks, tmp_path: Path, reshard: str, moves: int) -> None:
    settings = {"RUN_MODE": "fsdp", "LAB_VARIANT": "fsdp2", "LAB_PROOF": "0", "LAB_WIDTH": "64", "LAB_RESHARD": reshard}
    run, _ = run_experiment(ranks, 2, tmp_path, **settings)
    (wire,) = [entry for entry in run["comparisons"] if entry["name"] == "wire bytes"]
    size = 4 * outline(config_of(2, LAB_WIDTH="64")).num_parameters()
    assert wire["predicted"] == pytest.approx(moves / 2 * size)
    # A run does not decide by it, because the variant is PyTorch's.
    assert abs(wire["measured"] - wire["predicted"]) <= wire["tolerance"]


def test_tied_ends_are_one_unit() -> None:
    untied, tied = units(config_of(2)), units(config_of(2, LAB_TIE="1"))
    assert len(tied) == len(untied) - 1
    assert sum(tied) == outline(config_of(2, LAB_TIE="1")).num_parameters()


def count_gathered_units(group: dist.ProcessGroup, config: Config) -> tuple[set[int], int, int]:
    """Return how many units `zero3_blocking` has gathered when a layer computes, how many layers computed, and how many
    units are gathered after the step."""
    model = build_model(config, config.seed).double()
    strategy = built(MODE, "zero3_blocking", model, group, config)
    counts: list[int] = []

    def num_gathered() -> int:
        return sum(unit.whole.untyped_storage().nbytes() > 0 for unit in strategy.zero.units)

    for inner in (inner for layer in model.layers for inner in layer.children()):
        inner.register_forward_pre_hook(lambda *_: counts.append(num_gathered()))
    batches = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)
    strategy.backward(batches.microbatches(0, group.rank(), group.size()))
    strategy.update()
    return set(counts), len(counts), num_gathered()


@pytest.mark.parametrize("tie", ["0", "1"])
def test_zero3_blocking_gathers_one_layer_at_a_time(ranks: Ranks, tie: str) -> None:
    config = config_of(2, LAB_TIE=tie)
    num_inner = sum(len(list(layer.children())) for layer in outline(config).layers) - 1  # positions are only looked up
    assert ranks(2, count_gathered_units, config) == [({1}, 2 * num_inner, 0)] * 2
