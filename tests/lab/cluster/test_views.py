"""Views without sockets: once all living ranks have met, the first decides on the members, and all get the view."""

from collections.abc import Iterable
from typing import Any

import pytest

from distlab.lab.cluster.messages import Ask, Decide, Done, Living, Meet, Plan, Reborn, View
from distlab.lab.cluster.views import AGAIN, BEGIN, END, Views


class World:
    """Ranks that send messages, and the messages sent to each."""

    def __init__(self, size: int) -> None:
        self.sent: dict[int, list[Any]] = {rank: [] for rank in range(size)}
        self.views = Views(self.send)
        for rank in self.sent:
            self.views.joined(rank, 10 + rank)

    def send(self, ranks: Iterable[int], message: Any) -> None:
        for rank in list(ranks):
            self.sent[rank].append(message)

    def meet(self, *ranks: int, why: str = AGAIN, view: int = 1, members: Iterable[int] = (0, 1, 2)) -> None:
        for rank in ranks:
            lives = [(each, 10 + each) for each in members]
            self.views.on_message(rank, Meet(view, lives, why, b"%d" % rank))

    def last(self, rank: int, kind: type) -> Any:
        found = [each for each in self.sent[rank] if isinstance(each, kind)]
        return found[-1] if found else None

    def decided(self, rank: int) -> list[int]:
        """Return the ranks whose reports `rank`, the first member, has."""
        decide = self.last(rank, Decide)
        return [each for each, _, _ in decide.reports] if decide else []

    def plan(self, rank: int, members: Iterable[int]) -> None:
        decide = self.last(rank, Decide)
        lives = self.views.lives
        self.views.on_message(rank, Plan(decide.number, [(each, lives[each]) for each in members], b"plan"))


def test_all_begin_in_one_view_decided_by_the_first() -> None:
    world = World(3)
    world.meet(2, 0, why=f"{BEGIN} it", view=0, members=())
    assert world.decided(0) == [], "rank 1 has not met yet"
    assert world.last(1, Living).met == {2: f"{BEGIN} it", 0: f"{BEGIN} it"}
    world.meet(1, why=f"{BEGIN} it", view=0, members=())
    assert world.decided(0) == [0, 1, 2]
    world.plan(0, [0, 1, 2])
    assert [world.last(rank, View) for rank in range(3)] == [View(1, [(0, 10), (1, 11), (2, 12)], b"plan")] * 3
    kinds = [type(each) for each in world.sent[1]]
    assert world.last(1, Living).met == {} and Living in kinds[: kinds.index(View)][-1:], (
        "Living arrives before the view"
    )


@pytest.mark.parametrize("dead", [0, 2])
def test_the_survivors_agree_without_the_lost_rank(dead: int) -> None:
    world = World(3)
    survivors = [rank for rank in range(3) if rank != dead]
    world.meet(*survivors)
    assert world.decided(survivors[0]) == [], "they wait for it until its loss is known"
    world.views.lost(dead)
    assert world.decided(survivors[0]) == survivors
    assert dead not in world.last(survivors[0], Living).lives


def test_a_rank_that_returns_during_the_last_meeting_is_waited_for() -> None:
    world = World(3)
    world.views.lost(2)
    world.meet(0, 1, why=END)
    world.views.joined(2, 22)
    world.plan(0, [0, 1])
    assert world.last(1, View) is None and not world.views.ended
    world.meet(2, why=END)
    assert world.decided(0) == [0, 1, 2]
    world.plan(0, [0, 1, 2])
    assert world.last(2, View).members == [(0, 10), (1, 11), (2, 22)]
    assert world.views.ended


def test_the_first_dies_while_it_decides() -> None:
    world = World(3)
    world.meet(0, 1, 2)
    assert world.decided(0) == [0, 1, 2]
    world.views.lost(0)
    assert world.decided(1) == [1, 2]
    world.plan(1, [1, 2])
    assert world.last(2, View).members == [(1, 11), (2, 12)]


def test_a_plan_with_a_member_lost_meanwhile_is_requested_again() -> None:
    world = World(4)
    world.views.on_message(3, Ask(b"me"))
    world.meet(0, 1, 2)
    world.views.lost(3)
    world.views.on_message(0, Plan(2, [(0, 10), (1, 11), (2, 12), (3, 13)], b"plan"))
    assert world.last(1, View) is None
    assert len([each for each in world.sent[0] if isinstance(each, Decide)]) == 2


@pytest.mark.parametrize("number", [1, 3])
def test_a_plan_of_another_view_or_by_another_rank_is_ignored(number: int) -> None:
    world = World(3)
    world.meet(0, 1, 2)
    world.views.on_message(0, Plan(number, [(0, 10)], b"plan"))
    world.views.on_message(1, Plan(2, [(1, 11)], b"plan"))
    assert world.last(1, View) is None


def test_a_returned_rank_is_a_new_process_and_the_last_member() -> None:
    world = World(3)
    world.views.on_message(2, Reborn(99))
    world.views.on_message(2, Ask(b"member"))
    assert world.last(0, Living).requests == [(2, 99, b"member")]
    world.meet(0, 1)
    assert world.decided(0) == [0, 1], "the new process is not a member"
    world.plan(0, [0, 1, 2])
    assert world.last(2, View).members == [(0, 10), (1, 11), (2, 99)]
    assert world.last(0, Living).requests == [] or world.views.requests == {}


def test_a_rank_with_an_older_view_meets_the_members_of_the_newest() -> None:
    world = World(3)
    world.meet(0, view=1, members=[0, 1])
    world.meet(1, view=2, members=[0, 1, 2])
    assert world.decided(0) == []
    world.meet(2, view=2, members=[0, 1, 2])
    assert world.decided(0) == [0, 1, 2]
    assert world.last(0, Decide).number == 3


def test_ranks_outside_meet_only_at_a_beginning() -> None:
    world = World(3)
    world.views.on_message(2, Ask(b"member"))
    world.meet(0, 1, why="restart it")
    assert world.decided(0) == [0, 1]
    world = World(3)
    world.views.on_message(2, Ask(b"member"))
    world.meet(0, 1, why=f"{BEGIN} more")
    assert world.decided(0) == []


def test_the_end_is_sent_to_all() -> None:
    world = World(2)
    world.views.on_message(0, Done(4))
    assert [world.last(rank, Living).done for rank in (0, 1)] == [4, 4]
