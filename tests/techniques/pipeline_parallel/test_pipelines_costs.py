"""The formulas of pipelines compared with papers' figures and with the simulated schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlab.techniques.pipeline_parallel.costs import ahead, bubble, idle_share, in_flight, pipeline_ends
from distlab.techniques.pipeline_parallel.schedules import (
    Kind,
    Schedule,
    consumer_of,
    dualpipev,
    folded,
    gpipe,
    interleaved,
    one_forward_one_backward,
    owners,
    simulate,
    zb_h1,
    zbv,
)
from tests.techniques.pipeline_parallel.in_flight import most_in_flight

pytestmark = pytest.mark.timeout(60)


LASTS: dict[Kind, float] = {"forward": 1, "input": 1, "weight": 1, "backward": 2}


def test_bubble_of_the_papers() -> None:
    assert bubble(4, 8) == idle_share("1f1b", 4, 8) == idle_share("gpipe", 4, 8) == pytest.approx(3 / 11)
    assert bubble(4, 1) == idle_share("one_microbatch", 4, 1) == pytest.approx(3 / 4)  # one rank works
    assert idle_share("interleaved", 4, 8, 2) == pytest.approx(3 / 19)
    assert idle_share("zb_h1", 4, 8) == pytest.approx(3 / 27)
    assert idle_share("zbv", 4, 8) == idle_share("dualpipev", 4, 8) == pytest.approx(3 / 51)
    assert bubble(1, 5) == idle_share("interleaved", 1, 5, 3) == idle_share("zbv", 1, 5) == 0
    with pytest.raises(KeyError):
        idle_share("torch_interleaved_zb", 4, 8)


def made(ranks: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
    found = {
        "gpipe": gpipe(ranks, microbatches),
        "1f1b": one_forward_one_backward(ranks, microbatches),
        "interleaved": interleaved(ranks, microbatches, chunks),
        "zb_h1": zb_h1(ranks, microbatches),
        "zbv": zbv(ranks, microbatches),
    }
    return found | ({"dualpipev": dualpipev(ranks, microbatches)} if microbatches >= 2 * ranks else {})


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_formulas_equal_the_simulated_schedules(ranks: int, microbatches: int, chunks: int) -> None:
    """Idle share, warm-up passes and microbatches in flight, also for fewer microbatches than ranks."""
    for name, schedule in made(ranks, microbatches, chunks).items():
        spans = simulate(schedule, LASTS)
        stages = len(owners(schedule)) // ranks
        length = max(own[-1].end_s for own in spans)
        assert idle_share(name, ranks, microbatches, chunks) == pytest.approx(1 - 3 * stages * microbatches / length)
        for rank, actions in enumerate(schedule):
            turned = [action.kind for action in actions if action.kind != "weight"]
            first = next(index for index, kind in enumerate(turned) if kind != "forward")
            assert first == ahead(name, ranks, microbatches, rank, chunks), name
            assert most_in_flight(actions) == in_flight(name, ranks, microbatches, rank, chunks), name


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_more_chunks_and_more_microbatches_shrink_the_bubble(ranks: int, microbatches: int, chunks: int) -> None:
    share = idle_share("interleaved", ranks, microbatches, chunks)
    assert idle_share("interleaved", ranks, microbatches, chunks + 1) <= share + 1e-12
    assert idle_share("interleaved", ranks, microbatches + 1, chunks) <= share
    assert share <= bubble(ranks, microbatches) + 1e-12


def test_microbatches_in_flight_of_1f1b_and_gpipe() -> None:
    assert [in_flight("1f1b", 4, 8, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight("1f1b", 4, 2, rank) for rank in range(4)] == [2, 2, 2, 1]
    assert [in_flight("gpipe", 4, 8, rank) for rank in range(4)] == [8, 8, 8, 8]
    assert [in_flight("one_microbatch", 4, 8, rank) for rank in range(4)] == [1, 1, 1, 1]


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4))
def test_pipeline_ends_equal_the_schedules_sends(ranks: int, microbatches: int, chunks: int) -> None:
    for rank, actions in enumerate(interleaved(ranks, microbatches, chunks)):
        consumers = [consumer_of(action, ranks * chunks) for action in actions]
        sent = sum(consumer is not None and consumer.stage % ranks != rank for consumer in consumers)
        assert sent == microbatches * pipeline_ends(ranks, chunks, rank)
    places = folded(ranks)
    for rank, actions in enumerate(zbv(ranks, microbatches)):
        consumers = [consumer_of(action, 2 * ranks) for action in actions]
        sent = sum(consumer is not None and places[consumer.stage] != rank for consumer in consumers)
        assert sent == microbatches * pipeline_ends(ranks, 2, rank, folded=True)
