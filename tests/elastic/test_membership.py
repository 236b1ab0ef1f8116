"""Processes that agree on who is in, as threads of one process with real lines between them."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distlab.elastic.membership import BEGIN, GivenUp, Member, Membership, Report, View
from distlab.elastic.peer_connections import Address, Lines

pytestmark = pytest.mark.timeout(60)


def plain(there: list[Member], reports: dict[Member, Report]) -> Report:
    """All who are there are in, and the most steps count."""
    return {"members": there, "applied": max(report.get("applied", 0) for report in reports.values())}


class World:
    """Ranks with lines to each other."""

    def __init__(self, size: int) -> None:
        self.lines = [Lines(rank, "127.0.0.1", b"secret") for rank in range(size)]
        book = {rank: Address("127.0.0.1", each.port, 0) for rank, each in enumerate(self.lines)}
        for rank, each in enumerate(self.lines):
            each.book = book
            assert each.dial(range(rank)) == []
        self.members = [Membership(each, range(size), timeout_s=8) for each in self.lines]

    def at_once(self, **calls: Callable[[], Any]) -> dict[str, Any]:
        """What each call returns or raises, all made at the same time."""
        results: dict[str, Any] = {}

        def run(name: str, call: Callable[[], Any]) -> None:
            try:
                results[name] = call()
            except Exception as error:
                results[name] = error

        threads = [threading.Thread(target=run, args=each) for each in calls.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    def begin(self) -> list[View]:
        calls = {
            str(rank): (lambda each=each, rank=rank: each.assemble(f"{BEGIN} it", {"applied": rank}, plain))
            for rank, each in enumerate(self.members)
        }
        results = self.at_once(**calls)
        return [results[str(rank)] for rank in range(len(self.members))]

    def meet(self, *ranks: int) -> dict[str, Any]:
        def call(rank: int) -> Callable[[], Any]:
            return lambda: self.members[rank].meet({"applied": rank}, plain)

        return self.at_once(**{str(rank): call(rank) for rank in ranks})


@pytest.fixture
def world() -> Iterator[World]:
    made = World(4)
    yield made
    for each in made.lines:
        each.close()


def test_all_begin_in_one_view(world: World) -> None:
    views = world.begin()
    assert len(set(map(repr, views))) == 1
    assert views[0].ranks == (0, 1, 2, 3)
    assert views[0].plan == {"applied": 3}


@pytest.mark.parametrize("dead", [0, 2])
def test_those_who_are_left_agree_without_the_one_that_hung_up(world: World, dead: int) -> None:
    world.begin()
    world.lines[dead].hang_up()
    left = [rank for rank in range(4) if rank != dead]
    began = time.monotonic()
    views = world.meet(*left)
    assert {views[str(rank)].ranks for rank in left} == {tuple(left)}
    assert time.monotonic() - began < 1


def test_the_first_dies_while_the_others_wait_for_it(world: World) -> None:
    world.begin()
    world.lines[3].hang_up()
    threading.Timer(0.3, world.lines[0].hang_up).start()
    views = world.meet(1, 2)
    assert views["1"].ranks == views["2"].ranks == (1, 2)


def test_who_is_silent_is_waited_for_until_it_is_parted_from(world: World) -> None:
    world.begin()

    def part() -> None:
        for rank in range(3):
            world.members[rank].part(3)

    threading.Timer(0.4, part).start()
    began = time.monotonic()
    views = world.meet(0, 1, 2)
    assert views["0"].ranks == (0, 1, 2)
    assert time.monotonic() - began > 0.35
    with pytest.raises(GivenUp):
        world.members[3].meet({}, plain)


def test_who_comes_back_is_another_process_and_is_let_in(world: World) -> None:
    world.begin()
    world.lines[0].hang_up()
    world.members[0].forget()
    world.meet(1, 2, 3)
    assert world.lines[0].dial([1, 2, 3]) == []

    def lets_in(there: list[Member], reports: dict[Member, Report]) -> Report:
        return plain([*there, *world.members[1].asking], reports)

    def after_the_question(rank: int) -> Callable[[], Any]:
        def call() -> View | None:
            while not world.members[rank].asking:
                world.members[rank].news()
            return world.members[rank].meet({"applied": 5}, lets_in)

        return call

    results = world.at_once(
        back=lambda: world.members[0].ask({"as": "member"}, {}),
        **{str(rank): after_the_question(rank) for rank in (1, 2, 3)},
    )
    assert {results[name].ranks for name in ("back", "1", "2", "3")} == {(1, 2, 3, 0)}, "who came last stands last"


def test_whoever_waits_outside_hears_of_the_end(world: World) -> None:
    world.begin()
    world.lines[2].hang_up()
    world.members[2].forget()
    world.members[0].finish()  # it is said while rank 2 has no line
    assert world.lines[2].dial([0]) == []
    world.members[0].timeout_s = 1
    asked = world.at_once(
        outside=lambda: world.members[2].ask({}, {}),
        inside=lambda: world.members[0].assemble(f"{BEGIN} more", {}, plain),
    )
    assert asked["outside"] is None
    assert isinstance(asked["inside"], TimeoutError), "the others never came"


def test_who_never_comes_is_named(world: World) -> None:
    for each in world.members:
        each.timeout_s = 0.5
    assert "ranks [2, 3]" in str(world.at_once(
        a=lambda: world.members[0].assemble(f"{BEGIN} it", {}, plain), b=lambda: world.members[1].assemble(f"{BEGIN} it", {}, plain)
    )["a"])  # fmt: skip
