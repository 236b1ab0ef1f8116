"""Every context-parallel variant against one process in float64, what it sends, keeps and computes, and each mistake
seen."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.experiments.cp import MODE
from distlab.experiments.cp.bugs import mistake as MISTAKES
from distlab.experiments.cp.checks import COMPUTE, RECEIVE, Kernels, busiest, expected_order, predicted_share, tolerance
from distlab.experiments.cp.predictions import BY_HAND, NO_PATH
from distlab.lab.config import Config, ConfigError
from distlab.lab.measure.traffic import Calls
from distlab.lab.rank.preflight import refuse
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import build_model
from distlab.lab.workload.reference import train
from distlab.techniques.context_parallel.ring import RingAttention
from distlab.techniques.context_parallel.strategy import ContextParallel, contiguous, zigzag
from distlab.techniques.context_parallel.ulysses import UlyssesAttention
from distlab.techniques.mesh.grid import Mesh
from tests.labs import Runs, built, failed
from tests.warm_ranks import Ranks

SMALL = {
    "RUN_MODE": "cp", "LAB_WIDTH": "12", "LAB_DEPTH": "2", "LAB_HEADS": "6", "LAB_SEQ": "7", "LAB_BATCH": "3",
}  # fmt: skip
TOLERANCE = 1e-12
KINDS = ("gradients", "weights")

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(SMALL | {"WORLD_SIZE": str(world_size)} | settings)


def batches_of(config: Config, *, proof: bool = True) -> Batches:
    dtype = torch.float64 if proof else getattr(torch, config.dtype)
    return Batches(config, proof=proof, device=torch.device("cpu"), dtype=dtype)


def able(config: Config) -> list[str]:
    return [name for name in MODE.names if name not in MODE.cannot(config)]


def strategy_of(name: str, group: dist.ProcessGroup, config: Config, dtype: torch.dtype = torch.float64) -> Any:
    return built(MODE, name, build_model(config, config.seed).to(dtype), group, config)


# --- the proof ---


def differences(group: dist.ProcessGroup, config: Config) -> dict[str, dict[str, float]]:
    """For each variant the worst difference to one process over two steps."""
    plain = config.model_copy(update={"bug": None})
    dense = list(train(build_model(config, config.seed).double(), batches_of(plain), plain, 2))
    found = {}
    for name in able(config):
        strategy, worst = strategy_of(name, group, config), dict.fromkeys(("losses", *KINDS), 0.0)
        for step, snapshot in enumerate(dense):
            loss: Tensor = strategy.backward(batches_of(config).dealt(step, 0, 1)).clone()
            dist.all_reduce(loss, group=group)
            worst["losses"] = max(worst["losses"], abs(loss.item() - snapshot.loss))
            strategy.update()
            for kind in KINDS:
                tensors, wanted = dict(strategy.full(kind)), getattr(snapshot, kind)
                assert set(tensors) == set(wanted)
                apart = [(tensors[label] - wanted[label]).abs().max().item() for label in wanted]
                worst[kind] = max(worst[kind], *apart)
        found[name] = worst
    return found


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {"LAB_SEQ": "8"}),  # torch_ring, too
        (3, {"LAB_CLIP": "0.1", "LAB_OPTIMIZER": "adamw"}),
        (3, {"LAB_MICROBATCHES": "2", "LAB_TIE": "1"}),
        (4, {"LAB_SEQ": "13", "LAB_HEADS": "3"}),  # a rank without a head
        (5, {"LAB_SEQ": "3", "LAB_BATCH": "1"}),  # ranks without a position
    ],
)
def test_n_ranks_do_what_one_process_does(ranks: Ranks, world_size: int, settings: dict[str, str]) -> None:
    for of_rank in ranks(world_size, differences, config_of(world_size, **settings)):
        assert set(BY_HAND) <= set(of_rank)
        for name, worst in of_rank.items():
            assert max(worst.values()) <= TOLERANCE, (name, worst)


def beside_data_parallelism(group: dist.ProcessGroup, config: Config, name: str) -> float:
    """The largest difference of a gradient to one process, of ranks two by two: half of the samples, and half of the
    positions."""
    (dense,) = train(build_model(config, config.seed).double(), batches_of(config), config, 1)
    mesh = Mesh.grid({"dp": 2, "cp": 2}, group)
    positions = (zigzag if name == "zigzag" else contiguous)(config.seq, 2)
    attend = (RingAttention if name == "zigzag" else UlyssesAttention)(mesh["cp"], positions)
    model = build_model(config, config.seed).double()
    strategy = ContextParallel(model, positions, attend, group, config, rank=mesh.index("cp"))
    strategy.backward(batches_of(config).dealt(0, mesh.index("dp"), 2))
    found = dict(strategy.full("gradients"))
    return max((found[label] - dense.gradients[label]).abs().max().item() for label in dense.gradients)


@pytest.mark.parametrize("name", ["zigzag", "ulysses"])
def test_it_stacks_with_data_parallelism(ranks: Ranks, name: str) -> None:
    assert max(ranks(4, beside_data_parallelism, config_of(4), name)) <= TOLERANCE


@pytest.mark.parametrize("bug", [name for name, each in MISTAKES.items() if each.check in ("losses", "gradients")])
def test_each_mistake_is_seen_where_it_is_made_and_only_there(ranks: Ranks, bug: str) -> None:
    found = ranks(3, differences, config_of(3, LAB_BUG=bug))
    makers = MISTAKES[bug].where.variants
    for name in found[0]:
        worst = max(of_rank[name][MISTAKES[bug].check] for of_rank in found)
        assert worst > 1e-9 if name in makers else worst <= TOLERANCE, (name, worst)


# --- what is sent, and what is computed ---


def counted(group: dist.ProcessGroup, config: Config) -> dict[str, tuple[float, float, int, list[str]]]:
    """Of each variant: bytes and calls of a step, pairs, and the order of receives and kernels."""
    found = {}
    for name in BY_HAND:
        strategy = strategy_of(name, group, config, getattr(torch, config.dtype))
        microbatches, seen = batches_of(config, proof=False).dealt(0, 0, 1), Kernels()
        with Calls() as calls, seen:
            strategy.backward(microbatches)
        ops = calls.ops()
        found[name] = sum(op.called_bytes for op in ops), sum(op.calls for op in ops), seen.pairs, seen.order
    return found


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {"LAB_CLIP": "1", "LAB_SEQ": "8"}),
        (3, {"LAB_MICROBATCHES": "2", "LAB_DTYPE": "bfloat16"}),
        (4, {"LAB_SEQ": "3", "LAB_DTYPE": "float64", "LAB_TIE": "1"}),  # a rank without a position
        (4, {"LAB_HEADS": "3", "LAB_SEQ": "9"}),
    ],
)
def test_what_is_predicted_is_what_is_counted(ranks: Ranks, world_size: int, settings: dict[str, str]) -> None:
    config = config_of(world_size, **settings)
    predictions = {(each.variant, each.name): each for each in MODE.predict(config)}
    for rank, found in enumerate(ranks(world_size, counted, config)):
        for name, (nbytes, calls, pairs, order) in found.items():
            assert predictions[name, "wire bytes"].value[rank] == pytest.approx(nbytes, rel=1e-12), (rank, name)
            assert predictions[name, "calls"].value[rank] == calls, (rank, name)
            wanted = 2 * config.batch * config.depth * predicted_share(name, config).pairs[rank]
            assert wanted == pairs, (rank, name)
            if name in ("ring", "zigzag", "shift"):
                assert expected_order(name, config, rank) == order, (rank, name)


def test_a_layer_and_a_batch_more_send_as_much_more() -> None:
    one, deeper, larger = (
        {each.variant: each for each in MODE.predict(config_of(2, LAB_SEQ="8", **sizes)) if each.name == "wire bytes"}
        for sizes in ({"LAB_DEPTH": "2"}, {"LAB_DEPTH": "3"}, {"LAB_BATCH": "6"})
    )
    everything = 2 * 3 * 8 * 12 * 4  # K and V of a layer
    of_a_layer = 12 * 12 * 12 + 13 * 12  # its parameters
    for name, share in {"gathered": 1.0, "ring": 1.5, "zigzag": 1.5, "shift": 1.0, "ulysses": 1.0}.items():
        assert deeper[name].value[0] - one[name].value[0] == pytest.approx(share * everything + 4 * of_a_layer)
        assert larger[name].value[0] - one[name].value[0] == pytest.approx(2 * share * everything)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_the_default_length_folds_evenly_on_all_ranks(world_size: int) -> None:
    config = Config.read({"RUN_MODE": "cp", "WORLD_SIZE": str(world_size)})
    work = predicted_share("zigzag", config)
    assert work.share == 1.0
    assert busiest(tuple(work.pairs)) <= 1.02
    assert predicted_share("ring", config).share == pytest.approx(
        busiest(tuple(predicted_share("ring", config).pairs)), abs=0.02
    )


@pytest.mark.parametrize("seq", [2, 5, 16, 37, 64, 130])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_what_is_tolerated_is_what_rows_make_and_no_more(seq: int, world_size: int) -> None:
    config = config_of(world_size, LAB_SEQ=str(seq))
    for name in BY_HAND:
        work = predicted_share(name, config)
        assert abs(busiest(tuple(work.pairs)) - work.share) <= tolerance(config), name
    assert tolerance(config_of(4, LAB_SEQ="800")) == 0.02


def test_the_first_keys_are_asked_for_before_anything_is_computed() -> None:
    config = config_of(3, LAB_DEPTH="1")
    assert expected_order("zigzag", config, 0) == [
        RECEIVE, COMPUTE, RECEIVE, COMPUTE, COMPUTE,
        RECEIVE, COMPUTE, RECEIVE, COMPUTE, RECEIVE, COMPUTE, RECEIVE,
    ]  # fmt: skip
    assert expected_order("ring", config, 0) == [RECEIVE, COMPUTE, RECEIVE, RECEIVE, COMPUTE, RECEIVE, RECEIVE, RECEIVE]


# --- whole runs ---


def test_a_run_of_three_ranks_passes_and_tells_who_does_how_much(runs: Runs) -> None:
    ran = runs(3, RUN_MODE="cp", LAB_DEPTH="1", LAB_SEQ="30")
    assert failed(ran.judged) == set()
    balance = {each["variant"]: each for each in ran.judged["comparisons"] if each["name"] == "balance"}
    assert balance["ring"]["predicted"] == pytest.approx(5 / 3)
    assert balance["zigzag"]["predicted"] == 1.0
    assert ran.judged["skipped"] == [{"variant": "context_parallel", "reason": NO_PATH}]
    assert "Causal work" in (ran.folder / "rank0.log").read_text()


def test_what_a_small_model_keeps_is_predicted_with_its_positions(runs: Runs) -> None:
    sizes = {"LAB_WIDTH": "8", "LAB_DEPTH": "2", "LAB_SEQ": "32", "LAB_STEPS": "2", "LAB_PROOF": "0"}
    ran = runs(1, RUN_MODE="cp", LAB_VARIANT="gathered,ring", **sizes)
    assert failed(ran.judged) == set()
    rest = [each for each in ran.judged["comparisons"] if each["name"] == "rest bytes"]
    assert [each["variant"] for each in rest] == ["gathered", "ring"]
    assert all(each["measured"] == pytest.approx(each["predicted"], rel=1e-3) for each in rest), rest


# --- what cannot run ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_MODEL": "mlp"}, "LAB_MODEL=mlp has no sequence to share out, allowed: gpt"),
        ({"LAB_MODEL": "mine/own.py:model"}, "is cut by no rule that the lab knows"),
        ({"LAB_MICROBATCHES": "4"}, "LAB_MICROBATCHES=4 is more than the 3 samples"),
        ({"LAB_RECOMPUTE": "1"}, "LAB_RECOMPUTE=1 is not possible in cp"),
        ({"LAB_VARIANT": "torch_ring"}, "LAB_SEQ=7 is not a multiple of 4"),
        ({"LAB_VARIANT": "context_parallel"}, "does not have a sharding strategy"),
        ({"LAB_BUG": "unfolded"}, "LAB_SEQ=7: it takes 8 positions a rank"),
        ({"LAB_BUG": "no_lse", "LAB_SEQ": "3"}, "LAB_SEQ=3: it takes 4 positions"),
        ({"LAB_DEVICE": "cuda", "LAB_BACKEND": "gloo"}, "LAB_BACKEND=gloo sends no keys that live on a GPU"),
        ({"LAB_BUG": "by_arrival"}, "any more: LAB_BUG=local_positions in ulysses"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(settings: dict[str, str], words: str) -> None:
    config = config_of(2, **settings)
    with pytest.raises(ConfigError) as error:
        refuse(config, MODE.mistaken(config.bug))
    assert words in " ".join(error.value.faults)


def said(group: dist.ProcessGroup, config: Config) -> str:
    """What PyTorch says of its own on this machine."""
    strategy = strategy_of("context_parallel", group, config, torch.float32)
    try:
        strategy.backward(batches_of(config, proof=False).dealt(0, 0, 1))
    except Exception as error:
        return str(error)
    return ""


def test_pytorchs_context_parallel_still_has_no_path_for_the_cpu(ranks: Ranks) -> None:
    for words in ranks(2, said, config_of(2, LAB_SEQ="8", LAB_DEPTH="1")):
        assert "does not have a sharding strategy registered" in words
        assert "_scaled_dot_product_flash_attention_for_cpu" in words
