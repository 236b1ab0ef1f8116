"""When a rank says for whom it waits: not at once, not again and again, and not while it goes on itself."""

from workers.cluster.heartbeat import Hearing, Place
from workers.cluster.slowness import SLOW_AGAIN_S, SLOW_S, Slowness

HERE = Place(turn=5, step=2, phase="all_reduce", calls=1)


def hearing(turn: int) -> Hearing:
    """Rank 0's, of a rank 1 that has changed place so often, as it said at second 0."""
    hearings = [Hearing(rank, range(2), 2.5, 0.0) for rank in (0, 1)]
    hearings[0].take(hearings[1].beat(Place(turn, 1, "forward", since=-1.0), None, 0.0), 0.0)
    return hearings[0]


def test_who_is_behind_is_named_after_a_while_and_then_now_and_again() -> None:
    slowness, behind = Slowness(0.0), hearing(turn=3)
    slowness.sentence(behind, HERE, 10.0)  # it has come here just now
    said = {second: slowness.sentence(behind, HERE, second) for second in (12.9, 13.0, 13.5, 18.0)}
    assert [bool(sentence) for sentence in said.values()] == [False, True, False, True]
    assert (
        said[13.0]
        == (
            "waiting for 3.0 s at step 2 in all_reduce for rank 1 (at step 1 in forward for 14.0 s)"  # 1 s when it spoke at 0
        )
    )
    assert (SLOW_S, SLOW_AGAIN_S) == (3.0, 5.0)


def test_nothing_is_said_where_nobody_is_behind_or_this_rank_goes_on() -> None:
    slowness = Slowness(0.0)
    assert slowness.sentence(hearing(turn=5), HERE, 10.0) == ""
    going = [slowness.sentence(hearing(turn=3), Place(turn=10 + second), 20.0 + second) for second in range(8)]
    assert going == [""] * 8
