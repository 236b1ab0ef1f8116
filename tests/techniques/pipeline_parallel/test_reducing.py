"""Who is told what before each backward pass of a pipeline, and what is left of a step when it is over."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.techniques.mesh.reducing_pipeline import ReducingPipeline
from distlab.techniques.pipeline_parallel import schedules
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(60)


class Told:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.passes: list[bool] = []

    def begin(self) -> None: ...

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self.passes.append(last)
        yield

    def finish(self) -> None: ...


def told(group: dist.ProcessGroup, chunks: int) -> tuple[dict[int, list[bool]], bool, int]:
    """What each stage's reducer is told in a step, whether a batch is held after it, and bytes of the known shapes."""
    ranks = group.size()
    schedule = schedules.interleaved(ranks, 3, chunks) if chunks > 1 else schedules.gpipe(ranks, 3)
    stages = {number: nn.Linear(4, 4) for number in range(group.rank(), chunks * ranks, ranks)}
    reducers = {number: [Told()] for number in stages}
    pipeline = ReducingPipeline(stages, schedule[group.rank()], group, reducers)
    pipeline.step([torch.ones(2, 4, requires_grad=False) for _ in range(3)], lambda _, output: output.sum())
    samples = pipeline.boundaries._samples.values()
    held = sum(sample.untyped_storage().nbytes() for sample in samples) if ranks > 1 else 0
    return {number: of[0].passes for number, of in reducers.items()}, hasattr(pipeline, "_inputs"), held


@pytest.mark.parametrize(("world_size", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_reducers_learn_the_last_backward_pass(ranks: Ranks, world_size: int, chunks: int) -> None:
    for passes, holds_a_batch, _ in ranks(world_size, told, chunks):
        assert len(passes) == chunks
        assert all(of_stage == [False, False, True] for of_stage in passes.values())
        assert not holds_a_batch


def test_only_shapes_are_kept_between_steps(ranks: Ranks) -> None:
    assert all(held <= 3 * 4 for _, _, held in ranks(2, told, 1))
