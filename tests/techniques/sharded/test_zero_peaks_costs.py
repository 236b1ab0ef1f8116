"""What ZeRO holds beside the passes of two layers of 6 and 3 numbers on two ranks: chunks of 3 and 2."""

import pytest

from distlab.techniques.sharded.costs import Happening, Sharding, Units

UNITS = Units([6, 3], {4: 0, 5: 1}, {"4.w": 0, "5.w": 1})  # layers 4 and 5 of a pipeline's model


def gradient(layer: int, numel: int) -> list[Happening]:
    return [Happening("gradient", layer, f"{layer}.w"), Happening("taken", layer, f"{layer}.w", numel)]


BACKWARD = [
    Happening("output", 5),
    *gradient(5, 3),
    Happening("output", 4),
    *gradient(4, 6),
    Happening("passed"),
]
FORWARD = [Happening("layer", 4), Happening("left", 4), Happening("layer", 5), Happening("left", 5)]


def held(stage: int, passes: list[Happening], rank: int = 0, microbatches: int = 1) -> list[float]:
    """After each of these the most numbers that it came by."""
    holding = Sharding(stage, UNITS, rank, 2, 1, 0.0, microbatches=microbatches)
    return [max(holding.after(happening)) for happening in passes]


def test_stage_1_has_room_for_all_and_gets_scratch_with_the_last_microbatch() -> None:
    assert held(1, BACKWARD) == [0, 0, 2, 2, 2, 3, 3]
    assert held(1, BACKWARD * 2, microbatches=2)[:7] == [0] * 7
    # What was there is added to what comes, out of place: the sum stands there for a moment.
    assert held(1, BACKWARD * 2, microbatches=2)[7:] == [0, 0, 3, 2, 2, 2 + 6, 3]


@pytest.mark.parametrize(("rank", "own"), [(0, 2), (1, 1)])
def test_stage_2_collects_a_unit_sums_it_and_keeps_a_shard(rank: int, own: int) -> None:
    # The step before left shards of 3 and `own`; they go once the next one begins.
    assert held(2, [Happening("left", 4)], rank) == [3 + own]
    # 4 with padding are collected, then summed with 2 of scratch; the other unit's 6 come once a shard is left of it.
    assert held(2, [Happening("dealt"), *BACKWARD], rank) == [0, 0, 4, 6, 6, own + 6, own + 6 + 3, own + 6 + 3]


def test_stage_3_has_the_layer_that_computes_whole_and_the_next_one() -> None:
    assert held(3, [Happening("dealt"), *FORWARD]) == [0, 10, 4, 4, 0]
    whole = held(3, [Happening("dealt"), *FORWARD, *BACKWARD])[5:]
    # Both layers, then the last one's gradients beside them, its scratch; at last the first layer's alone.
    assert whole == [10, 14, 16, 12, 2 + 6 + 6, 2 + 6 + 9, 2 + 9]
