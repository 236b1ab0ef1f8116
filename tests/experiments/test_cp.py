"""Context parallelism: which positions attend to which, in which order, and combined with data parallelism."""

import pytest
import torch
import torch.distributed as dist

from distlab.experiments.cp import MODE
from distlab.experiments.cp.checks import COMPUTE, RECEIVE, Kernels, busiest, expected_order, predicted_share, tolerance
from distlab.experiments.cp.predictions import BY_HAND, NO_PATH
from distlab.lab.config import Config
from distlab.lab.workload.model import build_model
from distlab.lab.workload.reference import train
from distlab.techniques.context_parallel.ring import RingAttention
from distlab.techniques.context_parallel.strategy import ContextParallel, contiguous, zigzag
from distlab.techniques.context_parallel.ulysses import UlyssesAttention
from distlab.techniques.mesh.grid import Mesh
from tests.experiments.test_proofs import SENT, SMALL, Case, label
from tests.labs import Runs, failed
from tests.trained import TOLERANCE, batches_of, microbatches_of, strategy_of
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(SMALL["cp"] | {"RUN_MODE": "cp", "WORLD_SIZE": str(world_size)} | settings)


def largest_gradient_difference(group: dist.ProcessGroup, config: Config, name: str) -> float:
    """Return the largest difference of a gradient to one process on a 2 x 2 mesh, which splits samples and
    positions."""
    (dense,) = train(build_model(config, config.seed).double(), batches_of(config), config, 1)
    mesh = Mesh.grid({"dp": 2, "cp": 2}, group)
    positions = (zigzag if name == "zigzag" else contiguous)(config.seq, 2)
    attend = (RingAttention if name == "zigzag" else UlyssesAttention)(mesh["cp"], positions)
    model = build_model(config, config.seed).double()
    strategy = ContextParallel(model, positions, attend, group, config, rank=mesh.index("cp"))
    strategy.backward(batches_of(config).microbatches(0, mesh.index("dp"), 2))
    gradients = dict(strategy.full("gradients"))
    return max((gradients[label] - dense.gradients[label]).abs().max().item() for label in dense.gradients)


@pytest.mark.parametrize("name", ["zigzag", "ulysses"])
def test_context_parallelism_combines_with_data_parallelism(ranks: Ranks, name: str) -> None:
    assert max(ranks(4, largest_gradient_difference, config_of(4), name)) <= TOLERANCE


# --- traffic and compute ---


def attended_pairs(group: dist.ProcessGroup, config: Config) -> dict[str, tuple[int, list[str]]]:
    """Return for each variant the number of pairs, and the order of receives and kernels."""
    found, microbatches = {}, microbatches_of(config, group, 0, proof=False)
    for name in BY_HAND:
        strategy, kernels = strategy_of(name, group, config, getattr(torch, config.dtype)), Kernels()
        with kernels:
            strategy.backward(microbatches)
        found[name] = kernels.pairs, kernels.order
    return found


@pytest.mark.parametrize("case", [case for case in SENT if case.mode == "cp"], ids=label)
def test_attended_pairs_equal_the_prediction(ranks: Ranks, case: Case) -> None:
    config = config_of(case.world_size, **case.settings)
    for rank, found in enumerate(ranks(case.world_size, attended_pairs, config)):
        for name, (pairs, order) in found.items():
            assert pairs == 2 * config.batch * config.depth * predicted_share(name, config).pairs[rank], (rank, name)
            if name in ("ring", "zigzag", "shift"):
                assert expected_order(name, config, rank) == order, (rank, name)


def test_traffic_grows_with_layers_and_batch() -> None:
    one, deeper, larger = (
        {each.variant: each for each in MODE.predict(config_of(2, LAB_SEQ="8", **sizes)) if each.name == "wire bytes"}
        for sizes in ({"LAB_DEPTH": "2"}, {"LAB_DEPTH": "3"}, {"LAB_BATCH": "6"})
    )
    kv_bytes = 2 * 3 * 8 * 12 * 4  # K and V of a layer
    layer_parameters = 12 * 12 * 12 + 13 * 12  # its parameters
    for name, share in {"gathered": 1.0, "ring": 1.5, "zigzag": 1.5, "shift": 1.0, "ulysses": 1.0}.items():
        assert deeper[name].value[0] - one[name].value[0] == pytest.approx(share * kv_bytes + 4 * layer_parameters)
        assert larger[name].value[0] - one[name].value[0] == pytest.approx(2 * share * kv_bytes)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_the_default_length_balances_zigzag(world_size: int) -> None:
    config = Config.read({"RUN_MODE": "cp", "WORLD_SIZE": str(world_size)})
    work = predicted_share("zigzag", config)
    assert work.share == 1.0
    assert busiest(tuple(work.pairs)) <= 1.02
    assert predicted_share("ring", config).share == pytest.approx(
        busiest(tuple(predicted_share("ring", config).pairs)), abs=0.02
    )


@pytest.mark.parametrize("seq", [2, 5, 16, 37, 64, 130])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_balance_tolerance_covers_uneven_lengths(seq: int, world_size: int) -> None:
    config = config_of(world_size, LAB_SEQ=str(seq))
    for name in BY_HAND:
        work = predicted_share(name, config)
        assert abs(busiest(tuple(work.pairs)) - work.share) <= tolerance(config), name
    assert tolerance(config_of(4, LAB_SEQ="800")) == 0.02


def test_the_first_keys_are_requested_before_computing() -> None:
    config = config_of(3, LAB_DEPTH="1")
    assert expected_order("zigzag", config, 0) == [
        RECEIVE, COMPUTE, RECEIVE, COMPUTE, COMPUTE,
        RECEIVE, COMPUTE, RECEIVE, COMPUTE, RECEIVE, COMPUTE, RECEIVE,
    ]  # fmt: skip
    assert expected_order("ring", config, 0) == [RECEIVE, COMPUTE, RECEIVE, RECEIVE, COMPUTE, RECEIVE, RECEIVE, RECEIVE]


# --- whole runs ---


def test_a_run_of_three_ranks_reports_its_balance(runs: Runs) -> None:
    ran = runs(3, RUN_MODE="cp", LAB_DEPTH="1", LAB_SEQ="30")
    assert failed(ran.judged) == set()
    balance = {each["variant"]: each for each in ran.judged["comparisons"] if each["name"] == "balance"}
    assert balance["ring"]["predicted"] == pytest.approx(5 / 3)
    assert balance["zigzag"]["predicted"] == 1.0
    assert ran.judged["skipped"] == [{"variant": "context_parallel", "reason": NO_PATH}]
    assert "Causal work" in (ran.folder / "rank0.log").read_text()


def test_stored_bytes_of_a_small_model_include_positions(runs: Runs) -> None:
    sizes = {"LAB_WIDTH": "8", "LAB_DEPTH": "2", "LAB_SEQ": "32", "LAB_STEPS": "2", "LAB_PROOF": "0"}
    ran = runs(1, RUN_MODE="cp", LAB_VARIANT="gathered,ring", **sizes)
    assert failed(ran.judged) == set()
    rest = [each for each in ran.judged["comparisons"] if each["name"] == "rest bytes"]
    assert [each["variant"] for each in rest] == ["gathered", "ring"]
    assert all(each["measured"] == pytest.approx(each["predicted"], rel=1e-3) for each in rest), rest


# --- PyTorch's variant ---


def error_of_torch(group: dist.ProcessGroup, config: Config) -> str:
    """Return the error message of PyTorch's context parallelism on this machine."""
    strategy = strategy_of("context_parallel", group, config, torch.float32)
    try:
        strategy.backward(microbatches_of(config, group, 0, proof=False))
    except Exception as error:
        return str(error)
    return ""


def test_pytorchs_context_parallel_still_fails_on_the_cpu(ranks: Ranks) -> None:
    for words in ranks(2, error_of_torch, config_of(2, LAB_SEQ="8", LAB_DEPTH="1")):
        assert "does not have a sharding strategy registered" in words
        assert "_scaled_dot_product_flash_attention_for_cpu" in words
