"""The peak memory of a step: one process's bytes at each moment, plus the bytes that the strategy stores then."""

from collections.abc import Iterator

import pytest

from distlab.techniques.sharded.costs import PassEvent, Replicated, adamw_scratch_bytes, pass_peak, shown_on

# A pass of one layer with parameters of 10 and 2 numbers, and 100 bytes of activations that its gradients free.
PASSES = [
    PassEvent("batch", highest=30, live=20),
    PassEvent("layer", 0, highest=20, live=20),
    PassEvent("layer_end", 0, highest=120, live=120),
    PassEvent("gradient", 0, "0.w", 10, highest=160, live=160),
    PassEvent("delivered", 0, "0.w", 10, highest=160, live=120),
    PassEvent("gradient", 0, "0.b", 2, highest=128, live=28),
    PassEvent("delivered", 0, "0.b", 2, highest=28, live=20),
    PassEvent("microbatch_end", highest=20, live=20),
]


def test_peak_with_buckets_and_with_single_gradients() -> None:
    assert pass_peak(PASSES, Replicated(1000, 48, 4, in_buckets=True)) == 1000 + 48 + 160
    # The fresh gradient of 40 is part of the 160. Once delivered it stays, next to the 128 before the next one.
    assert pass_peak(PASSES, Replicated(1000, 48, 4, in_buckets=False)) == 1000 + 40 + 128
    twice = [*PASSES, *PASSES[1:]]  # the gradients of a second microbatch are added to those of the first
    assert pass_peak(twice, Replicated(1000, 48, 4, in_buckets=False)) == 1000 + 48 + 160


class Spike:
    """Stores 500 bytes for a moment while a gradient is delivered."""

    def stored_bytes(self) -> float:
        return 7.0

    def after(self, event: PassEvent) -> Iterator[float]:
        if event.name == "0.b" and event.kind == "delivered":
            yield 500.0
        yield 7.0


def test_a_short_spike_in_an_event_counts_for_the_peak() -> None:
    assert pass_peak(PASSES, Spike()) == 500 + 20


@pytest.mark.parametrize(("sizes", "numbers"), [([10], 20), ([10, 10], 30), ([10, 2, 9], 20), ([], 0)])
def test_adamw_keeps_the_last_denominator_while_it_computes_the_next(sizes: list[int], numbers: int) -> None:
    assert adamw_scratch_bytes(sizes, 4) == 4 * numbers


def test_gpu_peak_is_informational() -> None:
    assert shown_on("cpu") == ""
    assert "GPU" in shown_on("cuda")
