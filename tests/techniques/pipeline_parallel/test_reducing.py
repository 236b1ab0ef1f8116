"""A pipeline tells each stage's reducer which backward pass is the last, and keeps no batch after a step."""

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


class RecordingReducer:
    """Records whether each microbatch was announced as the last."""

    def __init__(self) -> None:
        self.passes: list[bool] = []

    def begin(self) -> None: ...

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self.passes.append(last)
        yield

    def finish(self) -> None: ...


def run_step(group: dist.ProcessGroup, chunks: int) -> tuple[dict[int, list[bool]], bool, int]:
    """Run a step; return each reducer's record, whether the inputs are kept, and the bytes of sample tensors."""
    ranks = group.size()
    schedule = schedules.interleaved(ranks, 3, chunks) if chunks > 1 else schedules.gpipe(ranks, 3)
    stages = {number: nn.Linear(4, 4) for number in range(group.rank(), chunks * ranks, ranks)}
    reducers = {number: [RecordingReducer()] for number in stages}
    pipeline = ReducingPipeline(stages, schedule[group.rank()], group, reducers)
    pipeline.step([torch.ones(2, 4, requires_grad=False) for _ in range(3)], lambda _, output: output.sum())
    samples = pipeline.boundaries._samples.values()
    sample_bytes = sum(sample.untyped_storage().nbytes() for sample in samples) if ranks > 1 else 0
    return {number: of[0].passes for number, of in reducers.items()}, hasattr(pipeline, "_inputs"), sample_bytes


@pytest.mark.parametrize(("world_size", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_reducers_learn_the_last_backward_pass(ranks: Ranks, world_size: int, chunks: int) -> None:
    for passes, keeps_inputs, _ in ranks(world_size, run_step, chunks):
        assert len(passes) == chunks
        assert all(of_stage == [False, False, True] for of_stage in passes.values())
        assert not keeps_inputs


def test_only_shapes_are_kept_between_steps(ranks: Ranks) -> None:
    assert all(sample_bytes <= 3 * 4 for _, _, sample_bytes in ranks(2, run_step, 1))
