"""Numbers that ZeRO stores during the passes of two layers of 6 and 3 numbers, on two ranks: chunks of 3 and 2."""

import pytest

from distlab.techniques.sharded.costs import PassEvent, Sharding, Units

UNITS = Units([6, 3], {4: 0, 5: 1}, {"4.w": 0, "5.w": 1})  # layers 4 and 5 of a pipeline's model


def gradient(layer: int, numel: int) -> list[PassEvent]:
    return [PassEvent("gradient", layer, f"{layer}.w"), PassEvent("delivered", layer, f"{layer}.w", numel)]


BACKWARD = [
    PassEvent("output", 5),
    *gradient(5, 3),
    PassEvent("output", 4),
    *gradient(4, 6),
    PassEvent("microbatch_end"),
]
FORWARD = [PassEvent("layer", 4), PassEvent("layer_end", 4), PassEvent("layer", 5), PassEvent("layer_end", 5)]


def most_numbers(stage: int, passes: list[PassEvent], rank: int = 0, microbatches: int = 1) -> list[float]:
    """Return how many numbers the rank stores at most during each event."""
    memory = Sharding(stage, UNITS, rank, 2, 1, 0.0, microbatches=microbatches)
    return [max(memory.after(event)) for event in passes]


def test_stage_1_stores_all_gradients_and_final_scratch() -> None:
    assert most_numbers(1, BACKWARD) == [0, 0, 2, 2, 2, 3, 3]
    assert most_numbers(1, BACKWARD * 2, microbatches=2)[:7] == [0] * 7
    # The new gradient is added to the old one out of place: for a moment there is also the sum.
    assert most_numbers(1, BACKWARD * 2, microbatches=2)[7:] == [0, 0, 3, 2, 2, 2 + 6, 3]


@pytest.mark.parametrize(("rank", "own"), [(0, 2), (1, 1)])
def test_stage_2_collects_a_unit_sums_it_and_keeps_a_shard(rank: int, own: int) -> None:
    # The step before left shards of 3 and `own`. They are freed when the next one begins.
    assert most_numbers(2, [PassEvent("layer_end", 4)], rank) == [3 + own]
    # 4 with padding are collected, then summed with 2 of scratch. The other unit's 6 follow when only a shard is left.
    assert most_numbers(2, [PassEvent("batch"), *BACKWARD], rank) == [0, 0, 4, 6, 6, own + 6, own + 6 + 3, own + 6 + 3]


def test_stage_3_stores_the_current_and_next_layer() -> None:
    assert most_numbers(3, [PassEvent("batch"), *FORWARD]) == [0, 10, 4, 4, 0]
    whole = most_numbers(3, [PassEvent("batch"), *FORWARD, *BACKWARD])[5:]
    # Both layers, then also the last one's gradients and scratch; at the end only the first layer's.
    assert whole == [10, 14, 16, 12, 2 + 6 + 6, 2 + 6 + 9, 2 + 9]
