"""Meshes: the norm over all axes, checkpoints read with another mesh, the placement of parameters, and LAB_MESH."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from distlab.experiments.mesh import MODE
from distlab.experiments.mesh.checks import compare_axes
from distlab.experiments.mesh.placement import HOW, Rank, at, default, misfit, sizes_of
from distlab.experiments.mesh.traffic import by_axis, owned
from distlab.lab.checkpoint import storage
from distlab.lab.config import Config
from distlab.lab.measure.traffic import CalledOp, Traffic
from distlab.lab.workload.model import build_model, outline
from distlab.lab.workload.reference import train
from tests.experiments.test_proofs import SMALL, TUNED
from tests.labs import built
from tests.trained import TOLERANCE, batches_of, largest_difference
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(180)


def config_of(world_size: int, mesh: str, **settings: str) -> Config:
    return Config.read(SMALL["mesh"] | {"RUN_MODE": "mesh", "WORLD_SIZE": str(world_size), "LAB_MESH": mesh} | settings)


def norms(group: dist.ProcessGroup, config: Config, names: tuple[str, ...]) -> dict[str, float]:
    """Return the gradient norm that each variant clips by."""
    norms_by_variant = {}
    for name in names:
        strategy = built(MODE, name, build_model(config, config.seed).double(), group, config)
        mesh = strategy.mesh
        strategy.backward(batches_of(config).microbatches(0, mesh.index("dp"), mesh.size("dp")))
        strategy.update()
        norms_by_variant[name] = strategy.norm.item()
    return norms_by_variant


def test_each_element_counts_once_in_the_norm(ranks: Ranks) -> None:
    config = config_of(4, "pp2,tp2", LAB_TIE="1", LAB_CLIP="0.05")
    plain = config.model_copy(update={"clip": None})
    (first,) = train(build_model(config, config.seed).double(), batches_of(plain), plain, 1)
    wanted = math.hypot(*(gradient.norm().item() for gradient in first.gradients.values()))
    for of_rank in ranks(4, norms, config, ("1f1b", "sequence", "zero2")):
        assert of_rank == pytest.approx(dict.fromkeys(of_rank, wanted), rel=1e-12)


# --- checkpoints ---


def differences_after_step(group: dist.ProcessGroup, config: Config, step: int, folder: Path) -> dict[str, float]:
    """Train `step` from the previous checkpoint, if there is one, and write the next; returns on rank 0 the largest
    difference to one process per kind and variant."""
    differences = {}
    (*_, last) = train(MODE.model(config, config.seed).double(), batches_of(config), config, step + 1)
    for name in SAVED:
        strategy = built(MODE, name, MODE.model(config, config.seed).double(), group, config)
        mesh, state = strategy.mesh, strategy.state_dict()
        if step:
            storage.load_state(state, folder / f"{name} {step - 1}", group)
            strategy.load_state_dict(state)
        strategy.backward(batches_of(config).microbatches(step, mesh.index("dp"), mesh.size("dp")))
        strategy.update()
        storage.save_state(strategy.state_dict(), folder / f"{name} {step}", group)
        for kind in ("weights", "optimizer"):
            dense = dict(strategy.full(kind))
            if group.rank() == 0:
                differences[f"{name} {kind}"] = largest_difference(dense, getattr(last, kind))
    return differences


SAVED = ("1f1b", "zero3")


def test_checkpoints_can_be_read_with_another_mesh(ranks: Ranks, tmp_path: Path) -> None:
    for step, mesh in enumerate(("dp2,cp2,tp2", "pp2,dp2", "tp2,cp2")):
        size = math.prod(int(each[2:]) for each in mesh.split(","))
        found, *_ = ranks(size, differences_after_step, config_of(size, mesh, LAB_DEPTH="3", **TUNED), step, tmp_path)
        assert len(found) == 2 * len(SAVED)
        assert max(found.values()) <= TOLERANCE, (mesh, found)


# --- the placement of parameters ---


def test_every_element_has_one_owner() -> None:
    config = config_of(6, "pp2,tp3", LAB_TIE="1")
    sizes = sizes_of("pp2,tp3", 6)
    total = 0
    for rank in range(6):
        placed = Rank(config, sizes, rank, HOW["1f1b"])
        for local in [local for unit in placed.units for local in unit]:
            is_second_copy = local.shared and not placed.is_first
            total += local.numel if not is_second_copy and (not local.whole or placed.at["tp"] == 0) else 0
    assert total == outline(config).num_parameters()


def test_the_last_axis_is_the_innermost() -> None:
    sizes = {"pp": 2, "dp": 1, "tp": 3}
    assert [at(rank, sizes)["tp"] for rank in range(6)] == [0, 1, 2, 0, 1, 2]


def test_replica_numbers_follow_the_order_of_axes() -> None:
    config, sizes = config_of(8, "dp2,tp2,cp2"), {"dp": 2, "tp": 2, "cp": 2, "pp": 1}
    ranks = [Rank(config, sizes, rank, HOW["zero3"]) for rank in range(8)]
    assert [rank.replica for rank in ranks] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert {(rank.replicas, rank.replicated) for rank in ranks} == {(4, "dp_cp")}
    turned = {"cp": 2, "dp": 2, "tp": 2, "pp": 1}
    assert [Rank(config, turned, rank, HOW["zero3"]).replica for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for unit in ranks[0].units:
        assert sum(owned(ranks[place], unit) for place in (0, 1, 4, 5)) == sum(local.numel for local in unit)


# --- checks that must fail ---


def recording_lab() -> Any:
    """Return a lab of rank 0 that records which comparisons pass."""
    claims: dict[str, bool] = {}

    def compare(name: str, predicted: float, measured: float, _unit: str, tolerance: float, *_: str, **__: str) -> None:
        claims[name] = abs(predicted - measured) <= tolerance

    return SimpleNamespace(rank=0, config=config_of(4, "dp2,tp2"), compare=compare, claims=claims)


@pytest.mark.parametrize("swapped", [False, True])
def test_bytes_along_a_wrong_axis_fail(swapped: bool) -> None:
    lab = recording_lab()
    rank = Rank(lab.config, {"dp": 2, "tp": 2, "pp": 1, "cp": 1}, 0, HOW["1f1b"])
    axis_of = {"dp": "tp", "tp": "dp"} if swapped else {"dp": "dp", "tp": "tp"}
    called = [CalledOp("sum", axis_of[axis], cost.calls, 0, cost.nbytes) for axis, cost in by_axis(rank).items()]
    compare_axes(lab, "1f1b", rank, SimpleNamespace(traffic=Traffic(called, {})))  # type: ignore[arg-type]
    assert lab.claims == {f"called bytes over {axis}": not swapped for axis in ("dp", "tp")}


def test_gradients_are_summed_over_dp_and_cp() -> None:
    config = config_of(4, "dp2,cp2")
    costs = by_axis(Rank(config, {"dp": 2, "cp": 2, "tp": 1, "pp": 1}, 0, HOW["1f1b"]))
    assert set(costs) == {"dp", "cp", "dp_cp"}
    assert costs["dp"].nbytes == 0  # nothing clips


# --- LAB_MESH ---


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(1, (1, 1, 1, 1)), (2, (1, 2, 1, 1)), (6, (1, 3, 1, 2)), (8, (2, 2, 1, 2))]
)
def test_the_default_mesh_fits_the_world_size(world_size: int, sizes: tuple[int, ...]) -> None:
    assert tuple(default(world_size).values()) == sizes  # pp, dp, cp, tp
    assert math.prod(sizes) == world_size


@pytest.mark.parametrize(
    ("mesh", "fault"),
    [
        ("dp2,tp2,pp2", ""),
        ("", ""),
        ("tp8", ""),
        ("dp2,tp2", "takes 4 ranks, but WORLD_SIZE=8"),
        ("dp2,dp4", "is no mesh"),
        ("cp8", ""),
        ("dp2,cp2,tp2", ""),
        ("ab8", "is no mesh"),
        ("dp4,ep2", "RUN_MODE=moe WORLD_SIZE=8 LAB_MESH=dp4,ep2 make run"),
        ("tp2,pp2,ep2", "RUN_MODE=moe WORLD_SIZE=4 LAB_MESH=ep2,tp2 make run"),
        ("dp0,tp8", "is no mesh"),
        ("2,4", "is no mesh"),
        ("dp2 tp4", "is no mesh"),
    ],
)
def test_an_invalid_mesh_is_refused_in_one_sentence(mesh: str, fault: str) -> None:
    found = misfit(mesh, 8)
    assert len(found) == bool(fault)
    assert all(fault in sentence and "LAB_MESH=" in sentence for sentence in found)


def test_impossible_variants_have_a_reason() -> None:
    reasons = MODE.cannot(config_of(2, "dp2"))
    assert "a tp of 2 or more" in reasons["sequence"]
    assert "a cp of 2 or more" in reasons["ulysses"]
    assert "ulysses" not in MODE.cannot(config_of(2, "cp2"))
