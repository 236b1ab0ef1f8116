"""Where the main thread is: what a wait hides, and when turns are counted."""

from types import SimpleNamespace

from distlab.cluster.failure_detector import MainThreadProgress


def test_a_wait_for_others_is_no_work() -> None:
    main = MainThreadProgress()
    main.at(3, "proof of ring")
    with main.waiting("loss"):
        assert (main.place.phase, main.work) == ("the wait at loss", (3, "proof of ring"))
    assert (main.place.phase, main.work) == ("proof of ring", (3, "proof of ring"))


def test_a_turn_is_counted_as_long_as_ranks_go_together() -> None:
    main = MainThreadProgress()
    main.at(0, "forward")
    main.at(0, "backward")
    assert main.place.turn == 2
    main.together = False
    main.at(1, "forward")
    assert (main.place.turn, main.place.step) == (2, 1)


def test_collectives_are_counted_from_where_it_came_to_this_place() -> None:
    main, group = MainThreadProgress(), SimpleNamespace(begun=7)
    group._get_sequence_number_for_group = lambda: group.begun
    main.follow(group)  # type: ignore[arg-type]
    main.at(0, "backward")
    group.begun = 9
    assert main.here().calls == 2
