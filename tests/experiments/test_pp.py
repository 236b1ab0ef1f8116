"""Every pipelined variant against one process in float64, what it sends and holds, each mistake, and refusals."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.experiments.pp import MODE
from distlab.experiments.pp.bugs import mistake as MISTAKES
from distlab.experiments.pp.options import Options
from distlab.experiments.pp.predictions import rest
from distlab.lab.config import Config, ConfigError
from distlab.lab.measure.traffic import Calls
from distlab.lab.rank.preflight import refuse
from distlab.lab.workload.data import Batches, shard_sizes
from distlab.lab.workload.model import build_model
from distlab.lab.workload.reference import Snapshot, train
from distlab.techniques.pipeline_parallel.costs import FOLDED, bubble
from distlab.techniques.pipeline_parallel.pipeline import Pipeline
from distlab.techniques.pipeline_parallel.strategy import pretend_compute
from tests.labs import built, copy_state, failed_with
from tests.warm_ranks import Ranks

TORCHS = ("torch_1f1b", "torch_interleaved_zb", "torch_zbv", "torch_dualpipev")
OURS = ("one_microbatch", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev")
SMALL = {"RUN_MODE": "pp", "LAB_WIDTH": "6", "LAB_DEPTH": "8", "LAB_HEADS": "2", "LAB_SEQ": "5"}
TOLERANCE = 1e-12
KINDS = ("losses", "gradients", "weights", "optimizer")

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(SMALL | {"WORLD_SIZE": str(world_size)} | settings)


def batches_of(config: Config) -> Batches:
    return Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)


def fitting(config: Config, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name not in MODE.cannot(config)]


def strategy_of(name: str, group: dist.ProcessGroup, config: Config) -> Any:
    return built(MODE, name, build_model(config, config.seed).double(), group, config)


def differences(
    group: dist.ProcessGroup, config: Config, names: tuple[str, ...] = OURS, steps: int = 3
) -> dict[str, dict[str, float]]:
    """For each variant the worst difference to one process, of each kind, on rank 0."""
    batches, dense = batches_of(config), list[Snapshot]()
    if group.rank() == 0:
        plain = config.model_copy(update={"bug": None})
        dense = list(train(build_model(config, config.seed).double(), batches_of(plain), plain, steps))
    found = {}
    for name in fitting(config, names):
        strategy, worst = strategy_of(name, group, config), dict.fromkeys(KINDS, 0.0)
        for step in range(steps):
            share = strategy.backward(batches.dealt(step, 0, 1))
            assert (share is None) == (
                group.rank() != (0 if name.removeprefix("torch_") in FOLDED else group.size() - 1)
            )
            loss = torch.zeros((), dtype=torch.float64) if share is None else share
            dist.all_reduce(loss, group=group)
            strategy.update()
            for kind in KINDS[1:] if step == steps - 1 else ("gradients",):
                tensors = dict(strategy.full(kind))
                assert group.rank() == 0 or not tensors
                if group.rank() == 0:
                    worst[kind] = max(worst[kind], farthest(tensors, getattr(dense[step], kind)))
            if group.rank() == 0:
                worst["losses"] = max(worst["losses"], abs(loss.item() - dense[step].loss))
        found[name] = worst
    return found


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert list(found) == list(wanted)
    assert all(found[name].shape == wanted[name].shape for name in wanted)
    return max(((found[name] - wanted[name]).abs().max().item() for name in wanted), default=0.0)


# --- the proof ---


@pytest.mark.parametrize(
    ("world_size", "model"),
    [(1, "gpt"), (2, "mlp"), (3, "gpt"), (4, "mlp"), (5, "gpt"), (6, "mlp"), (7, "mlp"), (8, "gpt")],
)
def test_n_ranks_do_what_one_process_does(ranks: Ranks, world_size: int, model: str) -> None:
    config = config_of(world_size, LAB_MODEL=model)
    found, *_ = ranks(world_size, differences, config)
    fits = {1: OURS, 2: OURS, 3: OURS[:6], 4: OURS[:6]}.get(world_size, (*OURS[:3], "zb_h1"))
    assert list(found) == list(fits)
    for name, worst in found.items():
        assert max(worst.values()) <= TOLERANCE, (name, worst)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (4, {"LAB_DEPTH": "7"}),
        (3, {"LAB_BATCH": "13"}),
        (3, {"LAB_BATCH": "13", "LAB_MICROBATCHES": "5", "LAB_DEPTH": "9"}),
        (2, {"LAB_TIE": "1"}),
        (1, {"LAB_TIE": "1"}),
        (4, {"LAB_TIE": "1", "LAB_CLIP": "0.05", "LAB_OPTIMIZER": "adamw"}),
        (3, {"LAB_CLIP": "0.05", "LAB_MODEL": "mlp"}),
        (1, {"LAB_MODEL": "line"}),
        (3, {"LAB_BATCH": "17", "LAB_MICROBATCHES": "7", "LAB_TIE": "1", "LAB_CLIP": "0.05"}),
    ],
)
def test_odd_sizes_tied_weights_and_clipping(ranks: Ranks, world_size: int, settings: dict[str, str]) -> None:
    found, *_ = ranks(world_size, differences, config_of(world_size, **settings))
    assert set(found) >= {"one_microbatch", "gpipe", "1f1b"}
    for name, worst in found.items():
        assert max(worst.values()) <= TOLERANCE, (name, worst)


@pytest.mark.parametrize("settings", [{"LAB_TIE": "1", "LAB_CLIP": "0.05"}, {"LAB_MODEL": "mlp"}])
def test_torch_does_the_same(ranks: Ranks, settings: dict[str, str]) -> None:
    found, *_ = ranks(3, differences, config_of(3, LAB_MICROBATCHES="8", **settings), TORCHS)
    assert tuple(found) == TORCHS
    for name, worst in found.items():
        assert max(worst.values()) <= TOLERANCE, (name, worst)


def tied(group: dist.ProcessGroup, config: Config) -> list[Tensor | None]:
    weights = []
    for name in fitting(config, OURS):
        strategy = strategy_of(name, group, config)
        for step in range(3):
            strategy.backward(batches_of(config).dealt(step, 0, 1))
            strategy.update()
        weight = strategy.parts.parameters.get("layers.0.token.weight")
        weights.append(None if weight is None else weight.detach())
    return weights


def test_tied_weights_stay_equal_to_the_bit(ranks: Ranks) -> None:
    first, middle, last = ranks(3, tied, config_of(3, LAB_TIE="1", LAB_CLIP="0.05", LAB_OPTIMIZER="adamw"))
    assert middle == [None] * 6
    assert last[-1] is None  # folded stages have both ends of the model on the first rank, and one copy
    assert all(torch.equal(one, other) for one, other in zip(first[:-1], last[:-1], strict=True))


def resumed(group: dist.ProcessGroup, config: Config) -> bool:
    batches = batches_of(config)
    strategies = [strategy_of("interleaved", group, config) for _ in range(2)]
    strategies[0].backward(batches.dealt(0, 0, 1))
    strategies[0].update()
    copy_state(strategies[0].state_dict(), state := strategies[1].state_dict())
    strategies[1].load_state_dict(state)
    for strategy in strategies:
        strategy.backward(batches.dealt(1, 0, 1))
        strategy.update()
    one, other = (strategy.parts.parameters for strategy in strategies)
    return all(torch.equal(one[name], other[name]) and one[name] is not other[name] for name in one)


def test_a_state_that_was_saved_goes_on_alike(ranks: Ranks) -> None:
    assert ranks(2, resumed, config_of(2, LAB_OPTIMIZER="adamw", LAB_TIE="1")) == [True, True]


# --- mistakes ---


WRONG_NUMBERS = [bug for bug, mistake in MISTAKES.items() if mistake.check in ("losses", "gradients", "weights")]


@pytest.mark.parametrize("bug", WRONG_NUMBERS)
def test_each_mistake_is_seen_where_it_is_made_and_only_there(ranks: Ranks, bug: str) -> None:
    config = config_of(3, LAB_BUG=bug, LAB_MICROBATCHES="8")
    found, *_ = ranks(3, differences, config, MODE.names, 1)
    assert set(found) == set(MODE.names)
    makers = MISTAKES[bug].where.variants
    for name, worst in found.items():
        assert (worst[MISTAKES[bug].check] > 1e-6) == (name in makers), (name, worst)
        assert (max(worst.values()) <= TOLERANCE) == (name not in makers), (name, worst)


def test_an_undivided_loss_makes_gradients_m_times_too_large(ranks: Ranks) -> None:
    settings = {"LAB_BATCH": "13", "LAB_MICROBATCHES": "13"}  # one sample each: all means weigh the same
    right, wrong = (
        ranks(1, first_gradient, config_of(1, **settings, **bug))[0] for bug in ({}, {"LAB_BUG": "undivided_loss"})
    )
    assert torch.allclose(wrong, 13 * right, rtol=1e-10)


def first_gradient(group: dist.ProcessGroup, config: Config) -> Tensor:
    strategy = strategy_of("1f1b", group, config)
    strategy.backward(batches_of(config).dealt(0, 0, 1))
    gradient: Tensor = dict(strategy.full("gradients"))["layers.3.mlp.up.weight"]
    return gradient


# --- what is sent, held and slept ---


def counted(group: dist.ProcessGroup, config: Config, names: tuple[str, ...]) -> dict[str, tuple[float, float, int]]:
    """Bytes and calls of the second step, and what was in flight."""
    found = {}
    for name in fitting(config, names):
        strategy = strategy_of(name, group, config)
        for step in range(2):
            with Calls() as seen:
                strategy.backward(batches_of(config).dealt(step, 0, 1))
                strategy.update()
        in_flight = strategy.engine.most_in_flight or 0
        found[name] = sum(op.called_bytes for op in seen.ops()), sum(op.calls for op in seen.ops()), in_flight
    return found


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"LAB_TIE": "1"}),
        (2, {}),
        (3, {"LAB_TIE": "1", "LAB_CLIP": "0.1", "LAB_BATCH": "13"}),
        (4, {"LAB_MODEL": "mlp", "LAB_MICROBATCHES": "7"}),
    ],
)
def test_bytes_and_calls_are_as_predicted(ranks: Ranks, world_size: int, settings: dict[str, str]) -> None:
    config = config_of(world_size, LAB_DTYPE="float64", **settings)
    predicted = {(claim.variant, claim.name): claim.value for claim in MODE.predict(config)}
    for rank, found in enumerate(ranks(world_size, counted, config, OURS)):
        for name, (nbytes, calls, _) in found.items():
            assert nbytes == pytest.approx(predicted[name, "wire bytes"][rank], rel=1e-12), (rank, name)
            assert calls == predicted[name, "calls"][rank], (rank, name)


def test_torch_sends_what_is_predicted_for_it(ranks: Ranks) -> None:
    config = config_of(3, LAB_DTYPE="float64")
    predicted = {claim.variant: claim for claim in MODE.predict(config) if claim.name == "wire bytes"}
    for rank, found in enumerate(ranks(3, counted, config, ("torch_1f1b",))):
        assert len(found) == 1
        for name, (nbytes, _, _) in found.items():
            assert nbytes == predicted[name].value[rank]
            assert not predicted[name].decides


def test_1f1b_holds_as_many_microbatches_as_the_pipe_is_long(ranks: Ranks) -> None:
    found = ranks(4, counted, config_of(4, LAB_MICROBATCHES="9"), OURS)
    assert [of_rank["1f1b"][2] for of_rank in found] == [4, 3, 2, 1]
    assert [of_rank["gpipe"][2] for of_rank in found] == [9] * 4
    assert [of_rank["one_microbatch"][2] for of_rank in found] == [1] * 4
    assert [of_rank["zb_h1"][2] for of_rank in found] == [4] * 4
    assert [of_rank["zbv"][2] for of_rank in found] == [8] * 4


def slept(group: dist.ProcessGroup, config: Config) -> dict[str, list[float]]:
    """Seconds that this rank pretends to compute in the second step of each variant, one entry a sleep."""
    found = {}
    batches = Batches(config, proof=True, device=torch.device("cpu"), dtype=torch.float64)
    sleeps = list[float]()
    with mock.patch("time.sleep", sleeps.append):
        for name in MODE.names:
            strategy = strategy_of(name, group, config)
            strategy.backward(batches.dealt(0, 0, 1))
            sleeps.clear()
            strategy.backward(batches.dealt(1, 0, 1))
            found[name] = list(sleeps)
    return found


def test_every_variant_pretends_the_same_compute(ranks: Ranks) -> None:
    config = config_of(2, LAB_SLEEP_MS="10")
    for found in ranks(2, slept, config):
        for name, sleeps in found.items():
            assert sum(sleeps) == pytest.approx(4 * 0.030, abs=1e-9), name
        sizes = shard_sizes(16, 4, uneven=True)
        assert sorted(found["gpipe"][:4]) == pytest.approx(sorted(0.010 * size / 4 for size in sizes))
        assert found["one_microbatch"] == pytest.approx([0.040, 0.040, 0.040])
        assert len(found["interleaved"]) == 2 * len(found["gpipe"]) == 24


def left_alive(group: dist.ProcessGroup, config: Config, name: str) -> tuple[int, int, int]:
    """Parameters of the dense model, those that a rank keeps, and those that are there when the variant is gone."""
    model = build_model(config, config.seed).double()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    strategy = built(MODE, name, model, group, config)
    del model
    strategy.backward(batches_of(config).dealt(0, 0, 1))
    strategy.update()
    gc.collect()
    kept = sum(parameter() is not None for parameter in parameters)
    assert kept == len(strategy.parts.parameters)
    del strategy
    gc.collect()
    return len(parameters), kept, sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "torch_1f1b"])
def test_a_rank_keeps_its_stages_alone_and_nothing_when_they_go(ranks: Ranks, name: str) -> None:
    (dense, first, gone), (_, second, also_gone) = ranks(2, left_alive, config_of(2), name)
    assert first + second == dense
    assert gone == also_gone == 0


# --- what is claimed ---


def test_predictions_are_those_of_the_papers() -> None:
    predicted = {(claim.variant, claim.name): claim for claim in MODE.predict(config_of(4, LAB_MICROBATCHES="8"))}
    passed = 16 * 5 * 6 * 4  # B x S x D x 4 bytes
    assert predicted["1f1b", "wire bytes"].value == (passed, 2 * passed, 2 * passed, passed)
    assert predicted["interleaved", "wire bytes"].value == (3 * passed, 4 * passed, 4 * passed, 3 * passed)
    assert predicted["one_microbatch", "calls"].value == (1, 2, 2, 1)
    assert predicted["1f1b", "calls"].value == (8, 16, 16, 8)
    assert predicted["gpipe", "bubble"].value == (bubble(4, 8),) * 4
    assert predicted["one_microbatch", "bubble"].value == (3 / 4,) * 4
    assert predicted["torch_1f1b", "bubble"].value == (bubble(4, 8),) * 4
    assert predicted["1f1b", "bubble"].value == (bubble(4, 8),) * 4
    assert predicted["1f1b", "bubble"].formula == "(p-1)/(m+p-1)"
    assert predicted["interleaved", "bubble"].value == pytest.approx((3 / 19,) * 4)
    assert predicted["zb_h1", "bubble"].value == pytest.approx((3 / 27,) * 4)
    assert predicted["dualpipev", "bubble"].value == pytest.approx((3 / 51,) * 4)
    assert predicted["zbv", "wire bytes"].value == (2 * passed, 4 * passed, 4 * passed, 2 * passed)
    assert ("torch_interleaved_zb", "bubble") not in predicted
    assert ("torch_1f1b", "calls") not in predicted
    assert not any(claim.decides for claim in predicted.values() if claim.name == "bubble")


def test_a_variant_that_cannot_run_is_not_predicted() -> None:
    config = config_of(8, LAB_BATCH="13")
    assert {claim.variant for claim in MODE.predict(config)} == {"one_microbatch", "gpipe", "1f1b", "zb_h1"}
    assert set(MODE.cannot(config)) == {"interleaved", "zbv", "dualpipev", *TORCHS}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LAB_DEPTH": "3"}, "LAB_DEPTH=3 layers are fewer than WORLD_SIZE=4: every stage needs one"),
        ({"LAB_MODEL": "line"}, "LAB_MODEL=line is one layer, less than WORLD_SIZE=4"),
        ({"LAB_BATCH": "3"}, "LAB_MICROBATCHES=4 is more than the 3 samples"),
        ({"LAB_HEADS": "4"}, "LAB_WIDTH=6 is not a multiple of LAB_HEADS=4"),
        ({"LAB_TEXT": "/nowhere"}, "LAB_TEXT='/nowhere' does not exist"),
        ({"LAB_VARIANT": "torch_1f1b", "LAB_BATCH": "13"}, "LAB_BATCH=13 is no multiple of LAB_MICROBATCHES=4"),
        ({"LAB_VARIANT": "1f1b_split"}, "zb_h1 has its backward passes in two as well"),
        ({"LAB_VARIANT": "torch_1f1b", "LAB_MICROBATCHES": "2"}, "LAB_MICROBATCHES=2 is fewer than its 4 stages"),
        ({"LAB_VARIANT": "torch_1f1b", "LAB_DEVICE": "cuda"}, "which gloo does not send"),
        ({"LAB_VARIANT": "interleaved", "LAB_BACKEND": "nccl", "LAB_DEVICE": "cuda"}, "NCCL runs messages in the order"),
        ({"LAB_BUG": "undivided_loss", "LAB_PROOF": "0"}, "nothing is compared"),
        ({"LAB_BUG": "undivided_loss", "LAB_MICROBATCHES": "1"}, "it takes 2 microbatches"),
        ({"LAB_BUG": "undivided_loss", "LAB_VARIANT": "one_microbatch"}, "it takes gpipe or 1f1b or interleaved or zb_h1"),
        ({"LAB_VARIANT": "dualpipev", "LAB_DEPTH": "8"}, "LAB_MICROBATCHES=4 is fewer than 2p = 8"),
        ({"LAB_VARIANT": "zbv", "LAB_DEPTH": "7"}, "two stages a rank on 4 ranks makes 8 stages, more than the 7"),
        ({"LAB_VARIANT": "torch_interleaved_zb", "LAB_MICROBATCHES": "11", "LAB_BATCH": "11"}, "no multiple of its 2 rounds"),
        ({"LAB_BUG": "stale_activation", "LAB_VARIANT": "torch_1f1b"}, "it takes gpipe or 1f1b"),
        ({"LAB_BUG": "stale_activation", "LAB_VARIANT": "one_microbatch,1f1b", "WORLD_SIZE": "2"}, "holds one microbatch at a time"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_sentence(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(config_of(4, **settings), MODE)
    (fault,) = refused.value.faults
    assert words in fault


def test_defaults_are_refused_nowhere() -> None:
    for world_size in range(1, 9):
        for model in ("gpt", "mlp"):
            config = Config.read({"RUN_MODE": "pp", "WORLD_SIZE": str(world_size), "LAB_MODEL": model})
            refuse(config, MODE)
            assert MODE.cannot(config).keys() <= set(MODE.names) - {*OURS[:3], "zb_h1"}
    refuse(Config.read({"RUN_MODE": "pp", "WORLD_SIZE": "1", "LAB_MODEL": "line"}), MODE)


def test_a_slow_rank_pretends_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for rank in ("0", "1"):
        settings = {"RUN_MODE": "pp", "RANK": rank, "MASTER_ADDR": "worker0", "WORLD_SIZE": "2", "LAB_BATCH": "4"}
        config = Config.read(settings | {"LAB_SLEEP_MS": "10", "LAB_MICROBATCHES": "2", "LAB_SLOW_RANK": "1:0.5"})
        stage = torch.nn.Linear(3, 3)
        pretend_compute({0: stage}, config, config.own(Options).sleep_ms, {})
        stage(torch.ones(2, 3)).sum().backward()
    assert slept == pytest.approx([0.01, 0.01, 0.01, 0.02, 0.02, 0.02])


def batch_kept(step: Any) -> Any:
    """A pipeline knows the batch between two steps."""

    def stepped(pipeline: Pipeline, inputs: Any, loss: Any) -> Any:
        pipeline.kept = inputs  # type: ignore[attr-defined]
        return step(pipeline, inputs, loss)

    return stepped


FAULTS: dict[str, tuple[Any, str, Any]] = {"left of a step": (Pipeline, "step", batch_kept)}


def test_what_a_step_leaves_fails_by_name(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"RUN_MODE": "pp", "LAB_VARIANT": "1f1b", "LAB_MICROBATCHES": "6", "LAB_STEPS": "1", "LAB_PROOF": "0"}
    assert "left of a step" in failed_with(ranks, tmp_path, __name__, "left of a step", **settings)


def test_what_a_stage_keeps_counts_a_tied_weight_once() -> None:
    config = config_of(1, LAB_TIE="1", LAB_OPTIMIZER="sgd")
    assert rest(config, [0], 0) == 2 * 4 * build_model(config, 1).num_parameters()
    assert rest(config_of(2, LAB_TIE="1"), [0, 1, 1, 0], 1) == rest(config_of(2), [0, 1, 1, 0], 1)  # of no end
