"""Batches: dealt disjoint and complete, weighed by samples, repeatable, and each mistake's trace in them."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distlab.config import Config
from distlab.workload import data
from distlab.workload.data import Batches, shard_sizes

SIZES = {"LAB_WIDTH": "8", "LAB_SEQ": "5"}


def batches_of(proof: bool = True, **settings: str) -> Batches:
    return Batches(Config.read(SIZES | settings), proof=proof, device=torch.device("cpu"), dtype=torch.float64)


@given(st.integers(1, 64), st.integers(1, 8), st.booleans())
def test_shards_are_complete_and_never_empty(batch: int, num_shards: int, uneven: bool) -> None:
    if batch < num_shards:
        return
    sizes = shard_sizes(batch, num_shards, uneven=uneven)
    assert sum(sizes) == batch
    assert min(sizes) >= 1
    if uneven and batch > num_shards > 1:
        assert len(set(sizes)) > 1


def test_the_lessons_shards() -> None:
    assert shard_sizes(32, 4, uneven=True) == [8, 6, 9, 9]
    assert Config.read({"LAB_MODEL": "line"}).batch == 32
    assert Config.read({"LAB_MODEL": "line", "LAB_BATCH": "7"}).batch == 7
    assert [len(batches_of(False, LAB_MODEL="line").sample_ids(0, shard, 4)) for shard in range(4)] == [8, 6, 9, 9]


def test_the_lessons_points() -> None:
    draw = random.Random(1)
    x = draw.uniform(-1.0, 1.0)
    y = 2.0 * x + 1.0 + draw.gauss(0.0, 0.1)
    points = batches_of(LAB_MODEL="line").full(0)
    assert (points.inputs[0].item(), points.targets[0].item()) == (x, y)
    assert points.inputs.shape == points.targets.shape == (32, 1)


@pytest.mark.parametrize("model", ["gpt", "mlp", "line"])
@pytest.mark.parametrize(
    ("batch", "num_shards", "microbatches"), [(7, 3, 1), (16, 4, 2), (9, 2, 4), (5, 5, 1), (8, 1, 3)]
)
def test_what_is_dealt_is_the_batch_and_its_shares_sum_to_one(
    model: str, batch: int, num_shards: int, microbatches: int
) -> None:
    batches = batches_of(LAB_MODEL=model, LAB_BATCH=str(batch), LAB_MICROBATCHES=str(microbatches))
    for step in range(3):
        dealt = [batches.dealt(step, shard, num_shards) for shard in range(num_shards)]
        flat = [part for parts in dealt for part in parts]
        assert all(1 <= len(parts) <= microbatches for parts in dealt)
        assert torch.equal(torch.cat([part.inputs for part in flat]), batches.full(step).inputs)
        assert torch.equal(torch.cat([part.targets for part in flat]), batches.full(step).targets)
        assert sum(part.share * part.targets.numel() for part in flat) == pytest.approx(1.0, abs=1e-12)
        ids = [sample for shard in range(num_shards) for sample in batches.sample_ids(step, shard, num_shards)]
        assert ids == batches.full_ids(step)
        assert len(set(ids)) == batch


@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_the_proof_has_two_batches_an_epoch_and_the_third_step_begins_the_next(model: str) -> None:
    batches = batches_of(LAB_MODEL=model)
    assert batches.proof_steps == 3
    assert sorted(batches.full_ids(0) + batches.full_ids(1)) == list(range(32))
    assert sorted(batches.full_ids(2) + batches.full_ids(3)) == list(range(32))
    assert batches.full_ids(2) != batches.full_ids(0)


def test_batches_repeat_and_follow_the_seed() -> None:
    assert batches_of(False).full_ids(5) == batches_of(False).full_ids(5) != batches_of(False, LAB_SEED="2").full_ids(5)


def test_gpt_predicts_the_next_byte() -> None:
    inputs, targets, share = batches_of().full(0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (inputs.shape, inputs.dtype, share) == ((16, 5), torch.int64, 1 / 80)


@pytest.mark.parametrize(
    ("environ", "replicas", "words"),
    [
        (
            {"LAB_BATCH": "16", "LAB_MICROBATCHES": "2"},
            4,
            "16 samples a step = 2 x 2 x 4 (microbatch, accumulated, replicas)",
        ),
        ({"LAB_BATCH": "17"}, 3, "17 samples a step = 6 + 6 + 5, a replica each, 1 microbatch"),
        ({"LAB_MODEL": "line"}, 4, "32 samples a step = 8 + 6 + 9 + 9, a replica each, 1 microbatch"),
        ({"RUN_MODE": "pp"}, 1, "16 samples a step = 4 x 4 x 1 (microbatch, accumulated, replicas)"),
    ],
)
def test_the_effective_batch_is_stated(environ: dict[str, str], replicas: int, words: str) -> None:
    assert data.effective_batch(Config.read(environ), replicas) == words


def test_faults_of_sizes() -> None:
    config = Config.read({"LAB_BATCH": "6", "LAB_MICROBATCHES": "2"})
    assert data.refusals(config, 3) == []
    assert "smaller than WORLD_SIZE=7" in data.refusals(config, 7)[0]
    assert "allowed: 1 to 1" in data.refusals(config, 4)[0]
