"""Memory between steps, compared with the figures of the ZeRO paper."""

import pytest

from distlab.lab.measure.memory import CLASSES
from distlab.techniques.sharded.costs import MIXED_PRECISION, mixed_precision_bytes, rest_bytes


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_papers_figure_1(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters on 64 ranks, Adam in mixed precision (K = 12)."""
    memory = rest_bytes(stage, 7.5e9, 7.5e9 / 64, itemsize=2, masters=True)
    assert round(sum(memory.values()) / 1e9, 1) == gigabytes
    assert set(memory) < set(CLASSES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_float32_with_adam_and_without(ranks: int) -> None:
    numel = 1000.0
    adam = [sum(rest_bytes(stage, numel, numel / ranks).values()) / numel for stage in range(4)]
    assert adam == pytest.approx([16, 8 + 8 / ranks, 4 + 12 / ranks, 16 / ranks], rel=1e-12)
    sgd = [sum(rest_bytes(stage, numel, numel / ranks, moments=0).values()) / numel for stage in range(4)]
    assert sgd == pytest.approx([8, 8, 4 + 4 / ranks, 8 / ranks], rel=1e-12)


def test_uneven_shards_add_up_with_steps_per_tensor() -> None:
    shards = [rest_bytes(3, 10, numel) for numel in (4, 4, 2)]
    assert {name: sum(shard[name] for shard in shards) for name in shards[0]} == rest_bytes(0, 10, 10)
    assert rest_bytes(2, 10, 2, num_tensors=3) == {"parameters": 40, "gradients": 8, "optimizer": 16 + 12}
    bfloat16 = rest_bytes(0, 10, 10, itemsize=2)  # the moments are then bfloat16 too
    assert bfloat16 == {"parameters": 20, "gradients": 20, "optimizer": 40}


def test_the_lessons_rule_is_half_of_adams_memory() -> None:
    assert list(MIXED_PRECISION.values()) == [2, 2, 4, 4, 4]
    assert mixed_precision_bytes(7e9) == 112e9 == 2 * 4 * 14e9  # the lesson says 4 x 14 GB = 56 GB
    assert mixed_precision_bytes(7e9) == sum(rest_bytes(0, 7e9, 7e9, itemsize=2, masters=True).values())
