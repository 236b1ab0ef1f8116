"""Every tensor-parallel variant against one process in float64, what it sends and holds, and each mistake seen."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.experiments.tp import MODE, compare_saved
from distlab.experiments.tp.checks import mistake as MISTAKES
from distlab.experiments.tp.predictions import SAVED
from distlab.lab.config import Config, ConfigError
from distlab.lab.measure.prediction import Prediction
from distlab.lab.measure.storages import SavedActivations
from distlab.lab.measure.traffic import Calls
from distlab.lab.rank.preflight import refuse
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import build_model, outline
from distlab.lab.workload.optimizer import local
from distlab.lab.workload.reference import Snapshot, train
from distlab.techniques.tensor_parallel.strategy import TensorParallel
from tests.lab.test_lab import held, lab_alone
from tests.labs import built, copy_state
from tests.warm_ranks import Ranks

SMALL = {
    "RUN_MODE": "tp",
    "LAB_WIDTH": "16",
    "LAB_DEPTH": "2",
    "LAB_HEADS": "8",
    "LAB_SEQ": "7",
    "LAB_BATCH": "5",
}
TOLERANCE = 1e-12
KINDS = ("gradients", "weights", "optimizer")

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(SMALL | {"WORLD_SIZE": str(world_size)} | settings)


def variants_of(config: Config) -> list[str]:
    return [name for name in MODE.names if name not in MODE.cannot(config)]


def batches_of(config: Config, *, proof: bool = True) -> Batches:
    dtype = torch.float64 if proof else getattr(torch, config.dtype)
    return Batches(config, proof=proof, device=torch.device("cpu"), dtype=dtype)


def strategy_of(
    name: str, group: dist.ProcessGroup, config: Config, dtype: torch.dtype = torch.float64
) -> TensorParallel:
    strategy = built(MODE, name, build_model(config, config.seed).to(dtype), group, config)
    assert isinstance(strategy, TensorParallel)
    return strategy


# --- the proof ---


def differences(group: dist.ProcessGroup, config: Config) -> dict[str, dict[str, float]]:
    """For each variant the worst difference to one process over three steps, of each kind, and between replicas."""
    plain = config.model_copy(update={"bug": None})
    dense, losses = list[Snapshot](), torch.zeros(3, dtype=torch.float64)
    if group.rank() == 0:
        dense = list(train(build_model(config, config.seed).double(), batches_of(plain), plain, 3))
        losses = torch.tensor([snapshot.loss for snapshot in dense], dtype=torch.float64)
    dist.broadcast(losses, group=group, group_src=0)
    found = {}
    for name in variants_of(config):
        strategy = strategy_of(name, group, config)
        worst = dict.fromkeys(("losses", *KINDS), 0.0)
        for step, wanted in enumerate(losses.tolist()):
            share = strategy.backward(batches_of(config).dealt(step, 0, 1))
            loss = torch.zeros((), dtype=torch.float64) if share is None else share.clone()
            dist.all_reduce(loss, group=group)
            worst["losses"] = max(worst["losses"], abs(loss.item() - wanted))
            strategy.update()
            for kind in KINDS:
                tensors = dict(strategy.full(kind))
                assert group.rank() == 0 or tensors == {}
                if group.rank() == 0:
                    worst[kind] = max(worst[kind], apart(tensors, getattr(dense[step], kind)))
        found[name] = worst | {"replicas": replicas_apart(strategy, group)}
    return found


def apart(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert set(tensors) == set(wanted)
    assert all(tensors[name].shape == wanted[name].shape for name in wanted)
    return max([0.0, *((tensors[name] - wanted[name]).abs().max().item() for name in wanted)])


def replicas_apart(strategy: TensorParallel, group: dist.ProcessGroup) -> float:
    mine = torch.cat([local(parameter.detach()).flatten() for _, parameter in strategy.whole()])
    first = mine.clone()
    dist.broadcast(first, group=group, group_src=0)
    return (mine - first).abs().max().item()


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (4, {"LAB_HEADS": "7", "LAB_WIDTH": "14"}),
        (5, {"LAB_HEADS": "24", "LAB_WIDTH": "24", "LAB_DEPTH": "1", "LAB_SEQ": "3"}),  # fewer positions than ranks
        (8, {"LAB_BATCH": "1", "LAB_DEPTH": "1"}),
        (4, {"LAB_TIE": "1", "LAB_MICROBATCHES": "3", "LAB_DEPTH": "1"}),
        (3, {"LAB_TIE": "1", "LAB_OPTIMIZER": "adamw", "LAB_CLIP": "0.5", "LAB_MICROBATCHES": "3"}),
        (2, {"LAB_OPTIMIZER": "adamw", "LAB_CLIP": "0.5"}),
        *((world_size, {"LAB_MODEL": "mlp"}) for world_size in (1, 2, 3, 6, 7)),
        (3, {"LAB_MODEL": "mlp", "LAB_BATCH": "13", "LAB_MICROBATCHES": "5", "LAB_CLIP": "0.1"}),
        (4, {"LAB_MODEL": "mlp", "LAB_WIDTH": "1"}),  # gathered: 1 output for 4 ranks
    ],
)
def test_n_ranks_do_what_one_process_does(ranks: Ranks, world_size: int, settings: dict[str, str]) -> None:
    for of_rank in ranks(world_size, differences, config_of(world_size, **settings)):
        assert {"gathered", "megatron", "sequence"} <= set(of_rank)
        for name, worst in of_rank.items():
            assert worst.pop("replicas") == 0.0, name
            assert max(worst.values()) <= TOLERANCE, (name, worst)


def test_dtensor_is_proven_where_it_splits_evenly() -> None:
    able = [world_size for world_size in range(1, 9) if "dtensor" in variants_of(config_of(world_size))]
    assert able == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("bug", "makers"),
    [
        ("double_reduce", {"megatron"}),
        ("lost_f", {"gathered", "megatron"}),
        ("packed_qkv", {"megatron", "sequence"}),
        ("bias_everywhere", {"megatron", "sequence"}),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_mistake_is_seen_where_it_is_made_and_only_there(
    ranks: Ranks, bug: str, makers: set[str], world_size: int
) -> None:
    found = ranks(world_size, differences, config_of(world_size, LAB_BUG=bug))
    for name in found[0]:
        worst = max(of_rank[name][MISTAKES[bug].check] for of_rank in found)
        assert worst > 1e-9 if name in makers else worst <= TOLERANCE, (name, found[0][name])


def test_double_reduce_multiplies_gradients_by_the_number_of_ranks(ranks: Ranks) -> None:
    config = config_of(2, LAB_BUG="double_reduce", LAB_MODEL="mlp", LAB_DEPTH="1")
    wrong, right = (ranks(2, gradient_of_up, config.model_copy(update={"bug": bug}))[0] for bug in (config.bug, None))
    assert torch.allclose(wrong, 2 * right, rtol=1e-12)


def gradient_of_up(group: dist.ProcessGroup, config: Config) -> Tensor:
    strategy = strategy_of("megatron", group, config)
    strategy.backward(batches_of(config).dealt(0, 0, 1))
    return next(each for label, _, each in strategy.held("gradients") if label == "layers.0.mlp.up.weight")


# --- what is sent, and what is held ---


def counted(group: dist.ProcessGroup, config: Config) -> dict[str, tuple[float, float, int]]:
    """Of each variant: bytes and calls of a step, and the most that it holds for the backward pass."""
    found = {}
    for name in variants_of(config):
        strategy = strategy_of(name, group, config, getattr(torch, config.dtype))
        with Calls() as calls, SavedActivations() as activations:
            strategy.backward(batches_of(config, proof=False).dealt(0, 0, 1))
            strategy.update()
        ops = calls.ops()
        found[name] = sum(op.called_bytes for op in ops), sum(op.calls for op in ops), activations.peak_bytes
        del strategy
    return found


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {"LAB_CLIP": "1"}),
        (3, {"LAB_MICROBATCHES": "2"}),
        (4, {"LAB_SEQ": "3", "LAB_DTYPE": "float64", "LAB_TIE": "1"}),  # a rank without a position
        (4, {"LAB_DTYPE": "bfloat16"}),
        (2, {"LAB_MODEL": "mlp"}),
        (4, {"LAB_MODEL": "mlp", "LAB_BATCH": "7", "LAB_MICROBATCHES": "2"}),  # 4 and 3 samples
        (8, {"LAB_MODEL": "mlp"}),
    ],
)
def test_what_is_predicted_is_what_is_counted(ranks: Ranks, world_size: int, settings: dict[str, str]) -> None:
    config = config_of(world_size, **settings)
    predictions = MODE.predict(config)
    assert {prediction.variant for prediction in predictions if prediction.decides} >= {
        "gathered",
        "megatron",
        "sequence",
    }
    for rank, found in enumerate(ranks(world_size, counted, config)):
        for prediction in predictions:
            if prediction.variant in found:
                nbytes, calls, held = found[prediction.variant]
                seen = {
                    "wire bytes": nbytes, "calls": calls, "activation bytes": found["megatron"][2] - held,
                }[prediction.name]  # fmt: skip
                assert prediction.value[rank] == pytest.approx(seen, rel=1e-12), (rank, prediction)


def test_a_layer_is_two_all_reduces_each_way() -> None:
    """4 a layer and 8(t-1)/t·b·s·h elements (Shoeybi 2019, section 3); and 4 for the ends and the loss."""
    for world_size in range(1, 9):
        shallow, deep = (config_of(world_size, LAB_DEPTH=depth) for depth in ("3", "4"))
        before, after = (
            {p.variant: p for p in MODE.predict(config) if p.name == "wire bytes"} for config in (shallow, deep)
        )
        assert after["megatron"].calls - before["megatron"].calls == 4
        assert before["megatron"].calls == 4 * 3 + 4
        elements = 8 * (world_size - 1) / world_size * 5 * 7 * 16
        for rank in range(world_size):
            assert after["megatron"].value[rank] - before["megatron"].value[rank] == pytest.approx(4 * elements)
        # The same bytes as chunks, all ranks together; and of the layer's norms and biases 6·h.
        whole = 2 * (world_size - 1) / world_size * 6 * 16
        more = sum(after["sequence"].value) - sum(before["sequence"].value)
        assert more == pytest.approx(4 * world_size * (elements + whole))


def test_a_batch_twice_as_large_sends_twice_as_much() -> None:
    one, two = (MODE.predict(config_of(4, LAB_BATCH=batch))[2] for batch in ("8", "16"))
    assert one.variant == "megatron" and one.name == "wire bytes"
    assert two.value == tuple(2 * value for value in one.value)


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_HEADS": "2"}, "LAB_HEADS=2 cannot be split over WORLD_SIZE=4"),
        (
            {"LAB_MODEL": "mlp", "LAB_WIDTH": "1", "WORLD_SIZE": "5"},
            "4 x LAB_WIDTH=1 cannot be split over WORLD_SIZE=5",
        ),
        ({"LAB_MODEL": "line"}, "LAB_MODEL=line has nothing that could be split"),
        ({"LAB_HEADS": "5"}, "LAB_WIDTH=16 is not a multiple of LAB_HEADS=5"),
        ({"LAB_MICROBATCHES": "6"}, "LAB_MICROBATCHES=6 is more than the 5 samples"),
        ({"LAB_TEXT": "/nowhere"}, "LAB_TEXT='/nowhere' does not exist"),
        (
            {"LAB_VARIANT": "megatron,dtensor", "WORLD_SIZE": "3"},
            "LAB_VARIANT='dtensor' cannot run: LAB_HEADS=8 is not",
        ),
        ({"LAB_BUG": "lost_f", "LAB_VARIANT": "sequence"}, "it takes gathered or megatron"),
        ({"LAB_BUG": "double_reduce", "LAB_VARIANT": "dtensor"}, "it takes megatron"),
        ({"LAB_BUG": "packed_qkv", "LAB_MODEL": "mlp"}, "it has no attention"),
        ({"LAB_BUG": "bias_everywhere", "WORLD_SIZE": "1"}, "it takes 2 ranks"),
        ({"LAB_BUG": "double_reduce", "LAB_PROOF": "0"}, "nothing is compared"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(Config.read(SMALL | {"WORLD_SIZE": "4"} | settings), MODE)
    (fault,) = refused.value.faults
    assert words in fault


def test_defaults_are_refused_nowhere() -> None:
    for world_size in range(1, 9):
        for model in ("gpt", "mlp"):
            config = Config.read({"RUN_MODE": "tp", "WORLD_SIZE": str(world_size), "LAB_MODEL": model})
            refuse(config, MODE)
            assert set(MODE.cannot(config)) <= {"dtensor"}


# --- a slice by itself ---


def resumed(group: dist.ProcessGroup, config: Config, name: str) -> bool:
    """Whether a fresh strategy goes on, to the bit, from what another one saved."""
    first, second = strategy_of(name, group, config), strategy_of(name, group, config)
    batches = batches_of(config)
    first.backward(batches.dealt(0, 0, 1))
    first.update()
    copy_state(first.state_dict(), state := second.state_dict())
    second.load_state_dict(state)
    for strategy in (first, second):
        strategy.backward(batches.dealt(1, 0, 1))
        strategy.update()
    held = [{key: local(tensor) for key, _, tensor in strategy.held("weights")} for strategy in (first, second)]
    return set(held[0]) == set(held[1]) and all(torch.equal(held[0][key], held[1][key]) for key in held[0])


@pytest.mark.parametrize("name", ["megatron", "sequence"])
def test_a_slice_goes_on_from_what_it_saved(ranks: Ranks, name: str) -> None:
    config = config_of(3, LAB_OPTIMIZER="adamw", LAB_TIE="1")
    assert ranks(3, resumed, config, name) == [True] * 3


def held_numel(group: dist.ProcessGroup, config: Config) -> tuple[int, int]:
    strategy = strategy_of("megatron", group, config)
    return sum(tensor.numel() for *_, tensor in strategy.held("weights")), sum(p.numel() for _, p in strategy.whole())


def test_slices_are_the_model_and_no_more(ranks: Ranks) -> None:
    config = config_of(3, LAB_TIE="1")
    found = ranks(3, held_numel, config)
    whole = found[0][1]
    assert sum(held - whole for held, _ in found) + whole == outline(config).num_parameters()
    assert max(held for held, _ in found) < 0.5 * outline(config).num_parameters()


def left_alive(group: dist.ProcessGroup, config: Config, name: str) -> int:
    """Parameters that are still there after a variant has trained and is gone."""
    strategy = strategy_of(name, group, config)
    strategy.backward(batches_of(config).dealt(0, 0, 1))
    strategy.update()
    parameters = [weakref.ref(parameter) for parameter in strategy.model.parameters()]
    del strategy
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("name", MODE.names)
def test_a_variant_that_is_gone_leaves_no_memory(ranks: Ranks, name: str) -> None:
    assert ranks(2, left_alive, config_of(2), name) == [0, 0]


@pytest.mark.parametrize(("saved", "holds"), [(100, True), (99, False), (0, False)])
def test_activations_that_are_not_saved_fail(saved: int, holds: bool) -> None:
    lab = lab_alone()
    held_bytes = {"megatron": 500, "sequence": 500 - saved}
    measured: Any = {name: SimpleNamespace(activation_bytes=nbytes) for name, nbytes in held_bytes.items()}
    compare_saved(lab, [Prediction("sequence", SAVED, "B", "", (100.0, 100.0), 0)], measured)
    assert held(lab) == {SAVED: holds}
