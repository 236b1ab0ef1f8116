"""The position in the data: the same after a resume, every sample once per epoch, and mistakes are counted."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.checkpoint import young_s
from distlab.contract import where_it_was
from distlab.lab.checkpoint.bugs import mistake as MISTAKES
from distlab.lab.checkpoint.manifest import TrainingPosition
from distlab.lab.workload.data import Batches
from tests.lab.checkpoint.made_up import config_of, manifest_of

BATCHES_PER_EPOCH = 8  # of mlp


def position_at(resumed_at: int | None = None, resumed_batch: Callable[[int], int] = where_it_was) -> TrainingPosition:
    config = config_of()
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    if resumed_at is None:
        return TrainingPosition(batches, ["flat"])
    epoch, batch = divmod(resumed_at, BATCHES_PER_EPOCH)
    seen = [sample for step in range(resumed_at - batch, resumed_at) for sample in batches.full_ids(step)]
    return TrainingPosition(
        batches, ["flat"], manifest_of(resumed_at, config, seen=seen, epoch=epoch, batch=batch), resumed_batch
    )


@pytest.mark.parametrize("step", [0, 5, 8, 13])
def test_a_resumed_run_continues_with_the_next_batch(step: int) -> None:
    position = position_at(step)
    assert position.first == position.done["flat"] == position.data_step(step) == step
    assert position.position(step) == divmod(step, BATCHES_PER_EPOCH)


@pytest.mark.parametrize("last", [12, 16, 21])
def test_each_sample_is_used_once_per_epoch_across_a_resume(last: int) -> None:
    position = position_at(5)
    for step in range(5, last):
        position.finish_step(step)
    assert position.wrongly_seen() == 0
    assert len(position.seen) == 3 * (last % BATCHES_PER_EPOCH)


@pytest.mark.parametrize("last", [6, 8, 21])
def test_a_repeated_epoch_is_counted(last: int) -> None:
    resumed_batch = MISTAKES["resume_repeats_epoch"].where.resumed_batch
    assert resumed_batch is not None
    position = position_at(5, resumed_batch)
    assert position.position(5) == (0, 0)
    for step in range(5, last):
        position.finish_step(step)
    assert position.wrongly_seen() >= 3


def test_a_missing_sample_is_counted_at_the_end_of_the_epoch() -> None:
    position = position_at(5)
    position.seen[0] = position.seen[1]
    for step in range(5, BATCHES_PER_EPOCH):
        position.finish_step(step)
    assert position.wrongly_seen() == 2  # one twice, one never


def test_youngs_interval() -> None:
    """For a checkpoint of 30 s and a loss every three hours."""
    assert young_s(30.0, 3 * 3600.0) == pytest.approx(805, abs=1)
