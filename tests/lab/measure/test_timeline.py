"""The arithmetic of spans, computed by hand, and the clocks of ranks on one machine, where their offset is known."""

import time

import pytest
import torch.distributed as dist

from distlab.lab.measure.timeline import Lap, Span, align, bubble, length, profile, union
from tests.warm_ranks import Ranks

pytestmark = pytest.mark.timeout(60)
SHIFT_S = 0.25


def shifted_by_rank(group: dist.ProcessGroup, shift_s: float) -> tuple[float, float]:
    """Align clocks of which rank r's is r * shift_s fast."""
    offset_s, uncertainty_s = align(group, lambda: time.perf_counter() + group.rank() * shift_s)
    return offset_s, uncertainty_s


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clocks_of_one_machine_agree(ranks: Ranks, world_size: int) -> None:
    first, *others = ranks(world_size, shifted_by_rank, 0.0)
    assert first == (0.0, 0.0)
    for offset_s, uncertainty_s in others:
        assert 0 < uncertainty_s < 0.02
        assert abs(offset_s) <= uncertainty_s


def test_a_clock_that_is_fast_is_found(ranks: Ranks) -> None:
    for rank, (offset_s, uncertainty_s) in enumerate(ranks(3, shifted_by_rank, SHIFT_S)):
        assert offset_s == pytest.approx(-rank * SHIFT_S, abs=uncertainty_s)
        assert uncertainty_s < SHIFT_S / 10  # else the line above would prove nothing


def test_time_counts_for_the_innermost_span() -> None:
    spans: list[Span] = [
        ("all_reduce", "", 2.0, 3.0),  # in the order of their ends
        ("wait", "", 4.5, 4.75),
        ("send", "", 4.0, 5.0),
        ("forward", "0", 1.0, 6.0),
        ("backward", "0", 6.0, 8.0),
        ("receive", "1", 9.0, 9.5),
        ("optimizer", "", 10.0, 10.5),
        ("input", "0", 11.0, 11.25),  # a backward pass in two parts
        ("weight", "0", 11.5, 12.0),
    ]
    assert profile(spans) == {
        "data": 0.0, "forward": 3.0, "backward": 2.75, "communication": 1.75, "optimizer": 0.5, "waiting": 0.75,
    }  # fmt: skip
    assert sum(profile(spans).values()) == pytest.approx(length(union(spans)))


def test_a_lap_separates_computing_from_sleeping() -> None:
    length_s = 0.002  # of the thread's own computing, and of its sleep
    with Lap() as around, Lap() as computing:
        until = time.thread_time() + length_s
        while time.thread_time() < until:
            pass
    assert 0.9 * length_s <= computing.cpu_s <= around.cpu_s
    assert 0.9 * length_s <= computing.wall_s <= around.wall_s
    outside, busy = time.perf_counter(), time.process_time()
    with Lap() as asleep:
        time.sleep(length_s)
    busy, outside = time.process_time() - busy, time.perf_counter() - outside
    assert 0 <= asleep.cpu_s <= busy
    assert 0.9 * length_s <= asleep.wall_s <= outside


def test_a_step_of_nothing_has_every_class() -> None:
    assert set(profile([]).values()) == {0.0}


def test_the_bubble_of_two_stages_and_two_microbatches() -> None:
    """Forward 1 s, backward 2 s: 6 s of work per rank in 9 s, (p-1)/(m+p-1) = 1/3."""
    first: list[Span] = [
        ("forward", "0", 0, 1),
        ("forward", "1", 1, 2),
        ("backward", "0", 4, 6),
        ("backward", "1", 7, 9),
    ]
    last: list[Span] = [
        ("forward", "0", 1, 2),
        ("backward", "0", 2, 4),
        ("forward", "1", 4, 5),
        ("backward", "1", 5, 7),
    ]
    waits: list[Span] = [
        ("receive", "0", 2, 4),
        ("optimizer", "", 9, 20),
    ]  # neither counts as compute nor extends the time
    assert bubble([first, last]) == pytest.approx(1 / 3)
    assert bubble([[*first, *waits], last]) == pytest.approx(1 / 3)
    assert bubble([first, last, []]) == pytest.approx(1 - 12 / 27)  # an idle rank counts as bubble


def test_no_bubble_without_compute() -> None:
    assert bubble([]) is None
    assert bubble([[], [("all_reduce", "", 0.0, 1.0)]]) is None
    assert bubble([[("forward", "0", 0.0, 1.0)]]) == 0.0


def test_a_union_joins_touching_spans() -> None:
    assert union([("send", "", 2.0, 3.0), ("send", "", 0.0, 1.0), ("send", "", 1.0, 2.0), ("send", "", 5.0, 6.0)]) == [
        (0.0, 3.0),
        (5.0, 6.0),
    ]
