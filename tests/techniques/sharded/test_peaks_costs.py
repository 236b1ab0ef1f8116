"""The most of a step: what one process's passes hold at each moment, and what is held beside them then."""

from collections.abc import Iterator

import pytest

from distlab.techniques.sharded.costs import Happening, Replicated, adamw_scratch_bytes, pass_peak, shown_on

# A pass of one layer with parameters of 10 and 2 numbers: activations of 100 bytes, gone with the gradients.
PASSES = [
    Happening("dealt", highest=30, live=20),
    Happening("layer", 0, highest=20, live=20),
    Happening("left", 0, highest=120, live=120),
    Happening("gradient", 0, "0.w", 10, highest=160, live=160),
    Happening("taken", 0, "0.w", 10, highest=160, live=120),
    Happening("gradient", 0, "0.b", 2, highest=128, live=28),
    Happening("taken", 0, "0.b", 2, highest=28, live=20),
    Happening("passed", highest=20, live=20),
]


def test_buckets_are_there_all_the_time_and_single_gradients_as_they_come() -> None:
    assert pass_peak(PASSES, Replicated(1000, 48, 4, in_buckets=True)) == 1000 + 48 + 160
    # The fresh gradient of 40 is among the 160; once it is taken it stays, beside the 128 before the next one.
    assert pass_peak(PASSES, Replicated(1000, 48, 4, in_buckets=False)) == 1000 + 40 + 128
    twice = [*PASSES, *PASSES[1:]]  # a second microbatch is added to what the first left
    assert pass_peak(twice, Replicated(1000, 48, 4, in_buckets=False)) == 1000 + 48 + 160


class Whole:
    """Holds 500 bytes for a moment while it hands a gradient over."""

    def held(self) -> float:
        return 7.0

    def after(self, happening: Happening) -> Iterator[float]:
        if happening.name == "0.b" and happening.what == "taken":
            yield 500.0
        yield 7.0


def test_a_moment_counts_that_a_strategy_comes_by() -> None:
    assert pass_peak(PASSES, Whole()) == 500 + 20


@pytest.mark.parametrize(("sizes", "numbers"), [([10], 20), ([10, 10], 30), ([10, 2, 9], 20), ([], 0)])
def test_adamw_keeps_the_last_parameters_denominator_while_it_makes_the_next(sizes: list[int], numbers: int) -> None:
    assert adamw_scratch_bytes(sizes, 4) == 4 * numbers


def test_a_gpu_only_shows() -> None:
    assert shown_on("cpu") == ""
    assert "GPU" in shown_on("cuda")
