"""Who goes on with whom, without sockets: once all who live have met the first decides, and all hear of it."""

from collections.abc import Iterable
from typing import Any

import pytest

from distlab.lab.cluster.messages import Ask, Decide, Done, Living, Meet, Plan, Reborn, View
from distlab.lab.cluster.views import AGAIN, BEGIN, END, Views


class World:
    """Ranks that say something, and what each was told."""

    def __init__(self, size: int) -> None:
        self.told: dict[int, list[Any]] = {rank: [] for rank in range(size)}
        self.views = Views(self.tell)
        for rank in self.told:
            self.views.joined(rank, 10 + rank)

    def tell(self, ranks: Iterable[int], message: Any) -> None:
        for rank in list(ranks):
            self.told[rank].append(message)

    def meet(self, *ranks: int, why: str = AGAIN, view: int = 1, members: Iterable[int] = (0, 1, 2)) -> None:
        for rank in ranks:
            lives = [(each, 10 + each) for each in members]
            self.views.on_message(rank, Meet(view, lives, why, b"%d" % rank))

    def last(self, rank: int, kind: type) -> Any:
        found = [each for each in self.told[rank] if isinstance(each, kind)]
        return found[-1] if found else None

    def decided(self, rank: int) -> list[int]:
        """The ranks of which `rank`, the first, has the reports."""
        decide = self.last(rank, Decide)
        return [each for each, _, _ in decide.reports] if decide else []

    def plan(self, rank: int, members: Iterable[int]) -> None:
        decide = self.last(rank, Decide)
        lives = self.views.lives
        self.views.on_message(rank, Plan(decide.number, [(each, lives[each]) for each in members], b"plan"))


def test_all_begin_in_one_view_that_the_first_decides() -> None:
    world = World(3)
    world.meet(2, 0, why=f"{BEGIN} it", view=0, members=())
    assert world.decided(0) == [], "rank 1 has not come"
    assert world.last(1, Living).met == {2: f"{BEGIN} it", 0: f"{BEGIN} it"}
    world.meet(1, why=f"{BEGIN} it", view=0, members=())
    assert world.decided(0) == [0, 1, 2]
    world.plan(0, [0, 1, 2])
    assert [world.last(rank, View) for rank in range(3)] == [View(1, [(0, 10), (1, 11), (2, 12)], b"plan")] * 3
    kinds = [type(each) for each in world.told[1]]
    assert world.last(1, Living).met == {} and Living in kinds[: kinds.index(View)][-1:], "known before the view"


@pytest.mark.parametrize("dead", [0, 2])
def test_those_who_are_left_agree_without_the_one_that_is_gone(dead: int) -> None:
    world = World(3)
    left = [rank for rank in range(3) if rank != dead]
    world.meet(*left)
    assert world.decided(left[0]) == [], "it is waited for until it is known to be gone"
    world.views.lost(dead)
    assert world.decided(left[0]) == left
    assert dead not in world.last(left[0], Living).lives


def test_who_comes_back_while_all_meet_for_the_end_is_waited_for_and_then_nobody_is_let_in() -> None:
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


def test_a_plan_with_a_member_that_went_meanwhile_is_asked_for_anew() -> None:
    world = World(4)
    world.views.on_message(3, Ask(b"me"))
    world.meet(0, 1, 2)
    world.views.lost(3)
    world.views.on_message(0, Plan(2, [(0, 10), (1, 11), (2, 12), (3, 13)], b"plan"))
    assert world.last(1, View) is None
    assert len([each for each in world.told[0] if isinstance(each, Decide)]) == 2


@pytest.mark.parametrize("number", [1, 3])
def test_a_plan_of_another_view_or_by_another_rank_is_none(number: int) -> None:
    world = World(3)
    world.meet(0, 1, 2)
    world.views.on_message(0, Plan(number, [(0, 10)], b"plan"))
    world.views.on_message(1, Plan(2, [(1, 11)], b"plan"))
    assert world.last(1, View) is None


def test_who_comes_back_is_another_process_and_is_let_in_behind_the_others() -> None:
    world = World(3)
    world.views.on_message(2, Reborn(99))
    world.views.on_message(2, Ask(b"member"))
    assert world.last(0, Living).asking == [(2, 99, b"member")]
    world.meet(0, 1)
    assert world.decided(0) == [0, 1], "as another process it is no member any more"
    world.plan(0, [0, 1, 2])
    assert world.last(2, View).members == [(0, 10), (1, 11), (2, 99)]
    assert world.last(0, Living).asking == [] or world.views.asking == {}


def test_members_of_a_newer_view_are_met_by_those_that_have_not_heard_of_it() -> None:
    world = World(3)
    world.meet(0, view=1, members=[0, 1])
    world.meet(1, view=2, members=[0, 1, 2])
    assert world.decided(0) == []
    world.meet(2, view=2, members=[0, 1, 2])
    assert world.decided(0) == [0, 1, 2]
    assert world.last(0, Decide).number == 3


def test_who_waits_outside_is_not_met_but_at_a_beginning() -> None:
    world = World(3)
    world.views.on_message(2, Ask(b"member"))
    world.meet(0, 1, why="restart it")
    assert world.decided(0) == [0, 1]
    world = World(3)
    world.views.on_message(2, Ask(b"member"))
    world.meet(0, 1, why=f"{BEGIN} more")
    assert world.decided(0) == []


def test_the_end_is_told_to_all() -> None:
    world = World(2)
    world.views.on_message(0, Done(4))
    assert [world.last(rank, Living).done for rank in (0, 1)] == [4, 4]
