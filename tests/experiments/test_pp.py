"""Pipelines: tied ends, microbatches in flight, simulated compute, formulas, and tensors left by a step."""

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
from distlab.experiments.pp.options import Options
from distlab.experiments.pp.predictions import stored_bytes
from distlab.lab.config import Config
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.model import build_model
from distlab.techniques.pipeline_parallel.costs import bubble
from distlab.techniques.pipeline_parallel.pipeline import Pipeline
from distlab.techniques.pipeline_parallel.pretend import pretend_compute
from tests.experiments.test_proofs import SMALL, TORCHS_PIPES, ours
from tests.labs import built, failed_with
from tests.trained import batches_of, counted, microbatches_of, runnable, strategy_of
from tests.warm_ranks import Ranks

TORCHS = TORCHS_PIPES
OURS = ours("pp")

pytestmark = pytest.mark.timeout(120)


def config_of(world_size: int, **settings: str) -> Config:
    return Config.read(SMALL["pp"] | {"RUN_MODE": "pp", "WORLD_SIZE": str(world_size)} | settings)


def tied_weights(group: dist.ProcessGroup, config: Config) -> list[Tensor | None]:
    weights = []
    for name in runnable(config, OURS):
        strategy = strategy_of(name, group, config)
        for step in range(3):
            strategy.backward(microbatches_of(config, group, step))
            strategy.update()
        weight = strategy.parts.parameters.get("layers.0.token.weight")
        weights.append(None if weight is None else weight.detach())
    return weights


def test_tied_weights_stay_bitwise_equal(ranks: Ranks) -> None:
    first, middle, last = ranks(3, tied_weights, config_of(3, LAB_TIE="1", LAB_CLIP="0.05", LAB_OPTIMIZER="adamw"))
    assert middle == [None] * 7
    assert last.pop(-2) is None  # with folded stages the first rank has both ends and the only copy
    assert first.pop(-2) is not None
    assert all(torch.equal(one, other) for one, other in zip(first, last, strict=True))


def test_an_undivided_loss_makes_gradients_m_times_too_large(ranks: Ranks) -> None:
    settings = {"LAB_BATCH": "13", "LAB_MICROBATCHES": "13"}  # one sample per microbatch, so all means weigh the same
    right, wrong = (
        ranks(1, first_gradient, config_of(1, **settings, **bug))[0] for bug in ({}, {"LAB_BUG": "undivided_loss"})
    )
    assert torch.allclose(wrong, 13 * right, rtol=1e-10)


def first_gradient(group: dist.ProcessGroup, config: Config) -> Tensor:
    strategy = strategy_of("1f1b", group, config)
    strategy.backward(microbatches_of(config, group, 0))
    gradient: Tensor = dict(strategy.full("gradients"))["layers.3.mlp.up.weight"]
    return gradient


# --- traffic, microbatches in flight and sleep ---


def test_torchs_pipeline_sends_the_predicted_bytes(ranks: Ranks) -> None:
    config = config_of(3, LAB_DTYPE="float64")
    predicted = {claim.variant: claim for claim in MODE.predict(config) if claim.name == "wire bytes"}
    for rank, found in enumerate(ranks(3, counted, config, ("torch_1f1b",))):
        assert len(found) == 1
        for name, step in found.items():
            assert step.nbytes == predicted[name].value[rank]
            assert predicted[name].shown


def test_microbatches_in_flight_follow_the_schedule(ranks: Ranks) -> None:
    found = ranks(4, counted, config_of(4, LAB_MICROBATCHES="9"), OURS)
    assert [of_rank["1f1b"].in_flight for of_rank in found] == [4, 3, 2, 1]
    assert [of_rank["gpipe"].in_flight for of_rank in found] == [9] * 4
    assert [of_rank["one_microbatch"].in_flight for of_rank in found] == [1] * 4
    assert [of_rank["zb_h1"].in_flight for of_rank in found] == [4] * 4
    assert [of_rank["zbv"].in_flight for of_rank in found] == [8] * 4


def sleep_times(group: dist.ProcessGroup, config: Config) -> dict[str, list[float]]:
    """Return the seconds of each sleep of this rank in the second step, for each variant."""
    found = {}
    batches = batches_of(config)
    sleeps = list[float]()
    with mock.patch("time.sleep", sleeps.append):
        for name in MODE.names:
            strategy = strategy_of(name, group, config)
            strategy.backward(batches.microbatches(0, 0, 1))
            sleeps.clear()
            strategy.backward(batches.microbatches(1, 0, 1))
            found[name] = list(sleeps)
    return found


def test_every_variant_sleeps_equally_long(ranks: Ranks) -> None:
    config = config_of(2, LAB_SLEEP_MS="10")
    for found in ranks(2, sleep_times, config):
        for name, sleeps in found.items():
            assert sum(sleeps) == pytest.approx(4 * 0.030, abs=1e-9), name
        sizes = shard_sizes(16, 4, uneven=True)
        assert sorted(found["gpipe"][:4]) == pytest.approx(sorted(0.010 * size / 4 for size in sizes))
        assert found["one_microbatch"] == pytest.approx([0.040, 0.040, 0.040])
        assert len(found["interleaved"]) == 2 * len(found["gpipe"]) == 24


def count_live_parameters(group: dist.ProcessGroup, config: Config, name: str) -> tuple[int, int, int]:
    """Return the number of parameters of the dense model, of this rank, and after the variant was deleted."""
    model = build_model(config, config.seed).double()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    strategy = built(MODE, name, model, group, config)
    del model
    strategy.backward(microbatches_of(config, group, 0))
    strategy.update()
    gc.collect()
    kept = sum(parameter() is not None for parameter in parameters)
    assert kept == len(strategy.parts.parameters)
    del strategy
    gc.collect()
    return len(parameters), kept, sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "torch_1f1b"])
def test_a_rank_keeps_only_its_own_stages(ranks: Ranks, name: str) -> None:
    (dense, first, left), (_, second, also_left) = ranks(2, count_live_parameters, config_of(2), name)
    assert first + second == dense
    assert left == also_left == 0


# --- predictions ---


def test_predictions_equal_the_papers_formulas() -> None:
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
    assert all(claim.shown for claim in predicted.values() if claim.name == "bubble")


def test_a_variant_that_cannot_run_is_not_predicted() -> None:
    config = config_of(8, LAB_BATCH="13")
    assert {claim.variant for claim in MODE.predict(config)} == {"one_microbatch", "gpipe", "1f1b", "zb_h1"}
    assert set(MODE.cannot(config)) == {"interleaved", "zbv", "dualpipev", *TORCHS}


def test_a_slow_rank_sleeps_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    for rank in ("0", "1"):
        settings = {"RUN_MODE": "pp", "RANK": rank, "MASTER_ADDR": "worker0", "WORLD_SIZE": "2", "LAB_BATCH": "4"}
        config = Config.read(settings | {"LAB_SLEEP_MS": "10", "LAB_MICROBATCHES": "2", "LAB_SLOW_RANK": "1:0.5"})
        stage = torch.nn.Linear(3, 3)
        pretend_compute({0: stage}, config, config.own(Options).sleep_ms, {})
        stage(torch.ones(2, 3)).sum().backward()
    assert seconds == pytest.approx([0.01, 0.01, 0.01, 0.02, 0.02, 0.02])


def keep_batch(step: Any) -> Any:
    """Keep the batch in the pipeline after a step."""

    def wrong(pipeline: Pipeline, inputs: Any, loss: Any) -> Any:
        pipeline.kept = inputs  # type: ignore[attr-defined]
        return step(pipeline, inputs, loss)

    return wrong


FAULTS: dict[str, tuple[Any, str, Any]] = {"left of a step": (Pipeline, "step", keep_batch)}


def test_tensors_left_by_a_step_fail_the_run(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"RUN_MODE": "pp", "LAB_VARIANT": "1f1b", "LAB_MICROBATCHES": "6", "LAB_STEPS": "1", "LAB_PROOF": "0"}
    assert "left of a step" in failed_with(ranks, tmp_path, __name__, "left of a step", **settings)


def test_stored_bytes_count_a_tied_weight_once() -> None:
    config = config_of(1, LAB_TIE="1", LAB_OPTIMIZER="sgd")
    assert stored_bytes(config, [0], 0) == 2 * 4 * build_model(config, 1).num_parameters()
    assert stored_bytes(config_of(2, LAB_TIE="1"), [0, 1, 1, 0], 1) == stored_bytes(
        config_of(2), [0, 1, 1, 0], 1
    )  # the second rank's stages have no end of the model
