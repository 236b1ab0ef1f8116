"""The formulas of pipelines: papers' figures, and bytes and bubble against the schedules themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.measure.formulas.pipelines import bubble, in_flight, pipeline_ends
from workers.parallel.schedules import gives, interleaved
from workers.parallel.simulation import simulate

pytestmark = pytest.mark.timeout(60)


def test_bubble_of_the_papers() -> None:
    assert bubble(4, 8) == pytest.approx(3 / 11)
    assert bubble(4, 8, chunks=2) == pytest.approx(3 / 19)
    assert bubble(4, 1) == pytest.approx(3 / 4)  # naive: one rank works
    assert bubble(1, 5) == bubble(1, 5, chunks=3) == 0
    assert bubble(8, 4, chunks=2) == pytest.approx(1 - 4 / (8 + 3 / 2))  # fewer microbatches than ranks


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_chunks_shrink_the_bubble_and_more_microbatches_do(ranks: int, microbatches: int, chunks: int) -> None:
    assert bubble(ranks, microbatches, chunks + 1) <= bubble(ranks, microbatches, chunks) + 1e-12
    assert bubble(ranks, microbatches + 1, chunks) <= bubble(ranks, microbatches, chunks)
    spans = simulate(interleaved(ranks, microbatches, chunks), 1, 2)
    assert max(own[-1].end_s for own in spans) * (1 - bubble(ranks, microbatches, chunks)) == pytest.approx(
        3 * chunks * microbatches
    )


def test_in_flight_is_bounded_by_the_pipe_in_1f1b_and_by_the_batch_in_gpipe() -> None:
    assert [in_flight("1f1b", 4, 8, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight("1f1b", 4, 2, rank) for rank in range(4)] == [2, 2, 2, 1]
    assert [in_flight("gpipe", 4, 8, rank) for rank in range(4)] == [8, 8, 8, 8]
    assert [in_flight("naive", 4, 8, rank) for rank in range(4)] == [1, 1, 1, 1]


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4))
def test_ends_are_those_at_which_the_schedule_sends(ranks: int, microbatches: int, chunks: int) -> None:
    for rank, actions in enumerate(interleaved(ranks, microbatches, chunks)):
        takers = [gives(action, ranks * chunks) for action in actions]
        sent = sum(taker is not None and taker.stage % ranks != rank for taker in takers)
        assert sent == microbatches * pipeline_ends(ranks, chunks, rank)
