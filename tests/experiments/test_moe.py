"""Whole moe runs at uneven sizes: proven with and without dropped tokens, with bytes computed from the routing."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.experiments.moe import MODE, NoDispatch, compute_and_sleep, mixing
from distlab.experiments.moe.checks import (
    Routes,
    busiest,
    by_expert,
    by_rank,
    check_capacity,
    check_choices,
    compare_pace,
    draw_experts,
    rows_of,
    simulated_s,
    tokens_of,
)
from distlab.experiments.moe.predictions import (
    even_row_bytes,
    expert_places,
    grids,
    misfit,
    placements,
    predict,
    proper_divisor,
    row_bytes,
    travels,
    without_grid,
)
from distlab.lab.config import Config, ConfigError
from distlab.lab.report.records import Chart, Check, Table, select
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import outline
from distlab.techniques.expert_parallel.layer import Placement, Routed
from tests.labs import TINY, built, failed, run_experiment
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)

OURS = ("replicated", "ep", "ep_dp", "ep_tp", "ep_dp_tp")
BIG = {"LAB_OPTIMIZER": "adamw", "LAB_CLIP": "0.05"}


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(TINY | {"RUN_MODE": "moe", "WORLD_SIZE": str(world_size)} | settings)


# Settings that could go wrong together: dropped tokens, top-1 routing, fewer experts than ranks, tied ends, uneven
# batches; four ranks have two axes.
MIXES: list[tuple[int, dict[str, str]]] = [
    (3, BIG | {"LAB_EXPERTS": "5", "LAB_CAPACITY": "0.7", "LAB_BATCH": "7", "LAB_TIE": "1", "LAB_DEPTH": "1"}),
    (4, BIG | {"LAB_EXPERTS": "3", "LAB_TOP_K": "1", "LAB_MODEL": "mlp", "LAB_BATCH": "13"}),
    (2, {"LAB_EXPERTS": "2", "LAB_CAPACITY": "0", "LAB_BALANCE": "none", "LAB_MODEL": "mlp", "LAB_DTYPE": "bfloat16"}),
    (1, {"LAB_EXPERTS": "1", "LAB_TOP_K": "1", "LAB_MODEL": "mlp", "LAB_DEPTH": "1"}),
    (
        8,
        BIG | {"LAB_MICROBATCHES": "2", "LAB_CAPACITY": "0.7", "LAB_EXPERTS": "3", "LAB_MODEL": "mlp"}
        | {"LAB_MESH": "dp2,ep2,tp2", "LAB_DEPTH": "1", "LAB_BATCH": "17"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "settings"), MIXES, ids=["drops", "mesh", "bfloat16", "alone", "three axes"])
def test_a_run_passes(ranks: Ranks, tmp_path: Path, world_size: int, settings: dict[str, str]) -> None:
    run, records = run_experiment(ranks, world_size, tmp_path, **({"RUN_MODE": "moe", "LAB_STEPS": "3"} | settings))
    assert failed(run) == set()
    names = {(claim["variant"], claim["name"]) for claim in run["checks"] + run["comparisons"]}
    proof = {"losses", "gradients", "weights"} | (
        {"optimizer state", "clipped gradients"} if "LAB_CLIP" in settings else set()
    )
    possible = set(OURS) - set(MODE.cannot(config_of(world_size, **settings)))
    assert possible & {"ep_dp", "ep_dp_tp"} == {4: {"ep_dp"}, 8: {"ep_dp_tp"}}.get(world_size, set())
    for name in possible:
        assert {(name, claim) for claim in proof | {"capacity", "wire bytes", "calls", "rest bytes"}} <= names
        assert ((name, "copies") in names) == (name in ("ep_dp", "ep_dp_tp"))
    charts = [chart.title for _, chart in select(records, Chart)]
    assert any("tokens per expert in" in title for title in charts)
    assert any("by the rank they come from" in title for title in charts)
    assert any("busiest rank" in title for title in charts)
    tables = [table for _, table in select(records, Table) if "the last step" in table.title]
    assert len(tables) == len(possible) + 1  # and PyTorch's
    assert all(len(table.rows) == world_size for table in tables)


def test_dropped_tokens_are_reported(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"LAB_MODEL": "mlp", "LAB_CAPACITY": "0.5", "LAB_EXPERTS": "4", "LAB_VARIANT": "ep"}
    _, records = run_experiment(ranks, 2, tmp_path, **({"RUN_MODE": "moe"} | settings))
    details = [check.detail for _, check in select(records, Check) if check.name == "capacity"]
    assert len(set(details)) == 1  # all ranks record the same totals
    dropped, choices = int(details[0].split()[0]), int(details[0].split()[2])
    assert choices == 16 * 2 * 2 * (4 + 3)  # tokens, choices, layers; timed and recorded steps
    assert choices / 2 <= dropped < choices


def test_the_proof_covers_steps_that_drop_tokens(ranks: Ranks) -> None:
    admitted, wanted = ranks(2, count_rows, config_of(2, LAB_CAPACITY="0.5", LAB_MODEL="mlp"))[0]
    assert admitted < wanted


def count_rows(group: dist.ProcessGroup, config: Config) -> tuple[int, int]:
    """Return the number of rows that experts admitted in the first step of ep, and that tokens requested."""
    routes = Routes()
    strategy = strategy_of("ep", group, config, routes)
    strategy.backward(batches_of(config).microbatches(0, group.rank(), group.size()))
    (routed,) = routes.notes_by_variant["ep"][0]["layers.0.mlp"]
    return sum(map(sum, routed.admitted)), sum(by_expert(routed))


def strategy_of(name: str, group: dist.ProcessGroup, config: Config, routes: Routes | None = None) -> Any:
    model = MODE.model(config, config.seed).double()
    return built((routes or Routes()).watching(MODE), name, model, group, config)


def batches_of(config: Config) -> Batches:
    return Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)


# --- predictions and checks ---


def test_only_rows_for_other_ranks_are_sent() -> None:
    """Rows [rank][expert] of three ranks; with ep their experts are 0 and 1, 2, and 3."""
    admitted = [[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 9]]
    placement = Placement.spread(4, 8, ep=3)
    assert travels(placement, 0, admitted) == (3 + 4, 5 + 6, 3)
    assert travels(placement, 2, admitted) == (0, 4 + 8, 2)
    assert travels(Placement.spread(4, 8, copies=3), 0, admitted) == (0, 0, 0)
    assert rows_of(placement, Routed([], admitted, 0)) == [14, 10, 21]
    assert rows_of(Placement.spread(4, 8, copies=3), Routed([], admitted, 0)) == [10, 26, 9]


def test_predictions_equal_the_formulas() -> None:
    config = config_of(4, LAB_DEPTH="1", LAB_MODEL="mlp", LAB_EXPERTS="4", LAB_TOP_K="1", LAB_BATCH="16")
    mixed, ranks = mixing(config), 4
    found = {(each.variant, each.name): each for each in predict(config, mixed)}
    dense, expert = 2 * 16 + 4 * 16, 2 * 16 * 64  # norm and router; an expert
    tables = 3 * 4 * 8  # one number per expert to three other ranks
    assert found["replicated", "wire bytes"].value == (1.5 * 4 * (dense + 4 * expert) + tables,) * ranks
    # Each rank's 4 tokens go evenly to 4 experts: 3 rows leave a rank and 3 arrive.
    assert found["ep", "wire bytes"].value == (1.5 * 4 * dense + tables + 2 * 6 * 16 * 4,) * ranks
    assert found["ep", "rest bytes"].value == (8.0 * (dense + expert),) * ranks
    assert found["replicated", "rest bytes"].value == (8.0 * (dense + 4 * expert),) * ranks
    assert found["ep", "wire bytes"].shown
    assert not found["replicated", "wire bytes"].shown
    routed = predict(config, mixed, {"ep": [[[4, 0, 0, 0]] * 4]})
    (wire,) = [each for each in routed if each.name == "wire bytes"]
    other_bytes = 1.5 * 4 * dense + tables
    assert wire.value == (other_bytes + 2 * 12 * 16 * 4, *[other_bytes + 2 * 4 * 16 * 4] * 3)
    assert not wire.shown


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_predicted_parameters_equal_the_models(name: str) -> None:
    config = config_of(2, LAB_MODEL=name, LAB_EXPERTS="5")
    found = MODE.model(config, 1).num_parameters()
    assert outline(config).num_parameters() + MODE.more_parameters(config) == found
    assert f"{found / 1e3:.1f}k parameters" in MODE.title(config)


@pytest.mark.parametrize(("number", "divisor"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 4)])
def test_two_axes_split_the_number_of_ranks(number: int, divisor: int) -> None:
    assert proper_divisor(number) == divisor
    for name, placement in placements(config_of(number), mixing(config_of(number))).items():
        assert placement.ranks_of_a_copy * placement.copies == number, name


@pytest.mark.parametrize(
    ("mesh", "variant"), [("dp2,ep4", "ep_dp"), ("ep2,tp4", "ep_tp"), ("dp2,ep2,tp2", "ep_dp_tp"), ("ep8", "ep")]
)
def test_lab_mesh_sets_the_grid_of_the_matching_variant(mesh: str, variant: str) -> None:
    config = config_of(8, LAB_MESH=mesh)
    sizes = {each[:2]: int(each[2:]) for each in mesh.split(",")}
    assert grids(config)[variant] == {"dp": 1, "ep": 1, "tp": 1} | sizes
    assert set(without_grid(config)) == {"ep_dp", "ep_tp", "ep_dp_tp"} - {variant}
    placement = placements(config, mixing(config))[variant]
    assert placement.copies == sizes.get("dp", 1)
    assert placement.ranks_of_a_copy * placement.copies == 8


@pytest.mark.parametrize(
    ("mesh", "fault"),
    [
        ("", ""),
        ("dp2,ep2,tp2", ""),
        ("dp4,ep1,tp1", "takes 4 ranks, but WORLD_SIZE=8: set WORLD_SIZE=4"),
        ("ep4,dp2", "in this order"),
        ("dp2,ep2,ep2", "each once"),
        ("dp2,cp4", "axes of RUN_MODE=mesh"),
        ("dp4,tp2", "without spreading them over ep"),
        ("2,4", "is no grid of experts"),
    ],
)
def test_an_invalid_grid_of_experts_is_refused(mesh: str, fault: str) -> None:
    found = misfit(mesh, 8)
    assert len(found) == bool(fault)
    assert all(fault in sentence and "LAB_MESH=" in sentence for sentence in found)


SETTINGS = {"LAB_EXPERTS": "2", "LAB_TOP_K": "1", "LAB_BATCH": "8", "LAB_MODEL": "mlp"}


def capacity_claims(routed: Routed, **settings: str) -> list[Any]:
    """Return the claims of the capacity check for one layer's batch."""
    config, routes = config_of(2, **settings), Routes()
    routes.timed = {"ep": {"layers.0.mlp": [routed]}}
    claims: list[Any] = []
    lab: Any = SimpleNamespace(config=config, check=lambda *claim, **_: claims.append(claim))
    check_capacity(lab, routes, mixing(config))
    return claims


@pytest.mark.parametrize(
    ("admitted", "difference"), [([[4, 0], [1, 3]], 0), ([[3, 0], [1, 3]], 1), ([[4, 0], [3, 3]], 2)]
)
def test_a_wrong_number_of_admitted_rows_fails(admitted: list[list[int]], difference: int) -> None:
    """Eight tokens choose one of two experts. Five choose the first, which has ceil(1.25·8/2) = 5 places."""
    routed = Routed([[[4, 0]], [[1, 3]]], admitted, 5)
    capacity, choices = capacity_claims(routed, **SETTINGS)
    assert capacity[:3] == ("capacity", difference, 0)
    assert choices[:3] == ("choices", 0, 0)


@pytest.mark.parametrize(("choices", "dropped", "difference"), [(8, 1, 0), (9, 1, 2), (7, 1, 2), (8, 0, 1), (9, 2, 1)])
def test_wrong_counts_of_choices_fail(choices: int, dropped: int, difference: int) -> None:
    """Eight tokens choose one expert each, and seven are admitted: the dropped one still counts as a choice."""
    notes = {"layers.0.mlp": [Routed([[[4, 0]], [[1, 3]]], [[3, 0], [1, 3]], 5)]}
    claims: list[Any] = []
    lab: Any = SimpleNamespace(config=config_of(2, **SETTINGS), check=lambda *claim, **_: claims.append(claim))
    check_choices(lab, "ep", notes, choices, dropped, 1)
    assert [claim[:3] for claim in claims] == [("choices", difference, 0)]


def test_the_busiest_rank_sets_the_pace() -> None:
    assert busiest([3, 1]) == 1.5
    assert busiest([0, 0]) == 1
    layers = [Routed([[[4, 0]], [[2, 2]]], [[3, 0], [1, 2]], 4), Routed([[[0, 4]], [[0, 4]]], [[0, 4], [0, 0]], 4)]
    times = [{"forward": 0.001, "backward": 0.002, "waiting": 0.5}] * 2
    title, rows = by_rank("ep", Placement.spread(2, 4, ep=2), layers, times)
    assert title.endswith(f"{(4 + 4) / (3 + 2):.2f} x the mean rank's rows")
    assert rows == [
        ["rank 0", "0 to 0", 8, 1, 4, "0.80", "3", "500"],
        ["rank 1", "1 to 1", 8, 5, 6, "1.20", "3", "500"],
    ]


def test_the_charts_show_the_tokens_of_each_expert() -> None:
    """Two ranks, two choices per token, and two experts, of which the first has three places."""
    routed = Routed([[[2, 0], [0, 2]], [[2, 1], [1, 2]]], [[2, 2], [1, 3]], 3)
    charts: dict[str, Any] = {}
    lab: Any = SimpleNamespace(chart=lambda title, _x, _y, series: charts.update({title.partition(": ")[2]: series}))
    mixed = mixing(config_of(2, LAB_EXPERTS="2"))
    draw_experts(lab, "ep", {"layers.0.mlp": [routed]}, mixed)
    by_kind, by_rank_of_origin = charts.values()
    assert by_kind == {"wanted": [[0, 1], [5, 5]], "taken": [[0, 1], [3, 5]], "places": [[0, 1], [3, 3]]}
    assert by_rank_of_origin == {"rank 0": [[0, 1], [2, 2]], "rank 1": [[0, 1], [3, 3]]}


def test_experts_sleep_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    rows = torch.ones(3, 2, requires_grad=True)
    output = compute_and_sleep(lambda rows, _: 2 * rows, 0.5, rows, [1, 2])
    output.sum().backward()
    assert seconds == [1.5, 3.0]
    assert bool((output == 2).all())
    assert rows.grad is not None
    assert bool((rows.grad == 2).all())


def test_a_step_is_paced_by_each_layers_busiest_rank() -> None:
    assert simulated_s([[4, 1], [2, 7]], 0.01) == pytest.approx(3 * 0.01 * (4 + 7))
    layers = [Routed([], [[3, 0], [1, 2]], 4), Routed([], [[0, 4], [0, 0]], 4)]
    routes, claims = Routes(), list[Any]()
    routes.timed = {"ep_tp": {f"layers.{number}.mlp": [layer] for number, layer in enumerate(layers)}}
    lab: Any = SimpleNamespace(
        config=config_of(2), profiles=lambda: {"ep_tp": {"forward": 0.1, "waiting": 0.2}}, rank=0,
        compare=lambda *claim, **words: claims.append((*claim, words)),
    )  # fmt: skip
    compare_pace(lab, routes, {"ep_tp": Placement.spread(2, 4, ep=1, tp=2)}, 0.01)
    ((name, predicted, measured, unit, words),) = claims
    assert (name, unit, words["shown"]) == ("paced by the busiest", "s", "a time")
    assert (predicted, measured) == (pytest.approx(3 * 0.005 * (6 + 4)), pytest.approx(0.3))
    compare_pace(lab, routes, {}, 0.0)  # nothing is pretended
    assert len(claims) == 1


def test_routes_of_timed_steps_are_kept_apart() -> None:
    routes = Routes()
    strategy = SimpleNamespace(model=SimpleNamespace(mixtures={"layers.0.mlp": SimpleNamespace(seen=None)}))
    ((variant,),) = [[each for each in MODE.variants if each.name == "ep"]]
    mode = replace(MODE, variants=(replace(variant, build=lambda *_: strategy),))
    build = routes.watching(mode).variants[0].build
    assert build is not None
    mixture, notes = strategy.model.mixtures["layers.0.mlp"], []
    for number in range(3):  # the proof, the timed steps, the counted one
        build(strategy.model, None, None)
        mixture.seen.append(number)
        notes.append(mixture.seen)
        if number == 1:
            routes.timed_steps_are_done()
    routes.all_is_done()
    assert routes.timed["ep"]["layers.0.mlp"] is notes[1]
    assert routes.counted["ep"]["layers.0.mlp"] is notes[2]


def test_tokens_are_bytes_of_text_or_samples() -> None:
    assert tokens_of(config_of(2)) == [16 * 8]
    assert tokens_of(config_of(2, LAB_MODEL="mlp", LAB_MICROBATCHES="3")) == [6, 5, 5]


def test_no_dispatch_keeps_rows_on_their_rank() -> None:
    stays = NoDispatch(1)
    assert stays.send_order([[1, 2], [0, 3]]).tolist() == [0, 1, 2]
    assert stays("rows", [[1, 2], [0, 3]], lambda *arguments: arguments) == ("rows", [0, 3])  # type: ignore[arg-type]


def test_balance_is_a_loss_or_nothing() -> None:
    assert [mixing(config_of(2, LAB_BALANCE=name)).balance for name in ("loss", "none")] == [0.01, 0.0]
    with pytest.raises(ConfigError, match="LAB_BALANCE='bias'"):
        config_of(2, LAB_BALANCE="bias")


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "places"),
    [(1024, 2, 8, 1.25, 320), (1024, 1, 8, 1.0, 128), (37, 1, 5, 1.0, 8), (3, 1, 8, 0.5, 1), (11, 2, 4, 0, 11)],
)
def test_capacity_per_expert(tokens: int, top_k: int, experts: int, factor: float, places: int) -> None:
    assert expert_places(tokens, top_k, experts, factor) == places


def test_row_bytes_cover_forward_and_backward() -> None:
    """A row that leaves is sent forward, and its result's gradient backward; one that arrives causes the other two."""
    assert row_bytes(1, 0, 5) == row_bytes(0, 1, 5) == 2 * 5 * 4
    assert row_bytes(3, 4, 5, itemsize=8) == 14 * 5 * 8


def test_even_rows_are_equal_on_all_ranks() -> None:
    """64 tokens on 4 ranks choose 2 of 8 experts: each rank sends 8 rows to each rank."""
    assert even_row_bytes(4, 64, 2, 5) == row_bytes(3 * 8, 3 * 8, 5)
    assert even_row_bytes(1, 64, 2, 5) == 0
