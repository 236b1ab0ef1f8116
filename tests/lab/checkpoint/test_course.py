"""The way through the data: the same after a resume, every sample once an epoch, and a mistake in it is counted."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.checkpoint import young_s
from distlab.contract import where_it_was
from distlab.lab.checkpoint.bugs import mistake as MISTAKES
from distlab.lab.checkpoint.manifest import TrainingPosition
from distlab.lab.workload.data import Batches
from tests.lab.checkpoint.made_up import config_of, manifest_of

BATCHES_AN_EPOCH = 8  # of mlp


def course_of(resumed_at: int | None = None, resumed_batch: Callable[[int], int] = where_it_was) -> TrainingPosition:
    config = config_of()
    batches = Batches(config, proof=False, device=torch.device("cpu"), dtype=torch.float32)
    if resumed_at is None:
        return TrainingPosition(batches, ["flat"])
    epoch, batch = divmod(resumed_at, BATCHES_AN_EPOCH)
    seen = [sample for step in range(resumed_at - batch, resumed_at) for sample in batches.full_ids(step)]
    return TrainingPosition(
        batches, ["flat"], manifest_of(resumed_at, config, seen=seen, epoch=epoch, batch=batch), resumed_batch
    )


@pytest.mark.parametrize("step", [0, 5, 8, 13])
def test_a_resumed_run_goes_on_with_the_batch_that_comes_next(step: int) -> None:
    course = course_of(step)
    assert course.first == course.done["flat"] == course.data_step(step) == step
    assert course.position(step) == divmod(step, BATCHES_AN_EPOCH)


@pytest.mark.parametrize("last", [12, 16, 21])
def test_before_and_after_a_resume_each_sample_is_seen_once_an_epoch(last: int) -> None:
    course = course_of(5)
    for step in range(5, last):
        course.passed(step)
    assert course.wrongly_seen() == 0
    assert len(course.seen) == 3 * (last % BATCHES_AN_EPOCH)


@pytest.mark.parametrize("last", [6, 8, 21])
def test_an_epoch_that_is_begun_anew_is_seen(last: int) -> None:
    resumed_batch = MISTAKES["resume_repeats_epoch"].where.resumed_batch
    assert resumed_batch is not None
    course = course_of(5, resumed_batch)
    assert course.position(5) == (0, 0)
    for step in range(5, last):
        course.passed(step)
    assert course.wrongly_seen() >= 3


def test_a_sample_that_is_left_out_is_seen_when_the_epoch_is_over() -> None:
    course = course_of(5)
    course.seen[0] = course.seen[1]
    for step in range(5, BATCHES_AN_EPOCH):
        course.passed(step)
    assert course.wrongly_seen() == 2  # one twice, one never


def test_youngs_interval_is_that_of_the_lessons() -> None:
    """A checkpoint of 30 s and a loss every three hours."""
    assert young_s(30.0, 3 * 3600.0) == pytest.approx(805, abs=1)
