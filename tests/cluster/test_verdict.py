"""Who is lost, from who hears whom alone: no sockets, no clocks."""

import itertools
from dataclasses import replace

import pytest
from msgspec.structs import asdict

from distlab.cluster import name_ranks
from distlab.cluster.lost_ranks import LastReport, Verdict, diagnose, lost_ranks

SIZES = range(2, 9)


def whole(world_size: int) -> dict[int, set[int]]:
    return {rank: set(range(world_size)) for rank in range(world_size)}


def seen(world_size: int, memory_share: float | None = None) -> dict[int, LastReport]:
    return {rank: LastReport(17, "all_reduce", memory_share, 2.6) for rank in range(world_size)}


@pytest.mark.parametrize("world_size", range(1, 9))
def test_nobody_is_lost_in_a_whole_cluster(world_size: int) -> None:
    assert lost_ranks(whole(world_size), set(range(world_size))) == frozenset()


@pytest.mark.parametrize("world_size", SIZES)
def test_a_silent_rank_is_lost_for_every_survivor(world_size: int) -> None:
    for dead in range(world_size):
        hears = {rank: heard - {dead} for rank, heard in whole(world_size).items() if rank != dead}
        assert lost_ranks(hears, set(range(world_size))) == {dead}


@pytest.mark.parametrize("world_size", range(3, 9))
def test_a_rank_is_lost_while_only_some_have_noticed(world_size: int) -> None:
    for dead, first in itertools.permutations(range(world_size), 2):
        hears = whole(world_size)
        hears[first] -= {dead}
        assert lost_ranks(hears, set(range(world_size))) == {dead}


@pytest.mark.parametrize("world_size", range(3, 9))
def test_of_a_broken_link_the_higher_end_is_lost_and_both_are_named(world_size: int) -> None:
    for low, high in itertools.combinations(range(world_size), 2):
        hears = whole(world_size)
        hears[low] -= {high}
        hears[high] -= {low}
        verdict = diagnose(hears, set(range(world_size)), seen(world_size))
        assert verdict is not None
        assert [lost.rank for lost in verdict.lost] == [high]
        assert f"rank {low} and rank {high} lost heartbeats from each other" in verdict.sentence
        assert "at step 17 in all_reduce" in verdict.sentence


@pytest.mark.parametrize("world_size", SIZES)
def test_a_split_names_the_smaller_side_on_both_and_halves_name_each_other(world_size: int) -> None:
    everyone = set(range(world_size))
    for size in range(1, world_size):
        one, other = set(range(size)), set(range(size, world_size))
        verdicts = [lost_ranks(dict.fromkeys(side, side), everyone) for side in (one, other)]
        if len(one) == len(other):
            assert verdicts == [other, one]
        else:
            smaller = min(one, other, key=len)
            assert verdicts == [smaller, smaller]


def test_a_cut_off_rank_says_so_of_itself() -> None:
    verdict = diagnose({2: {2}}, {0, 1, 2}, seen(3))
    assert verdict is not None
    assert (
        verdict.sentence
        == "rank 2 is partitioned from the cluster at step 17 in all_reduce: no heartbeat from ranks 0 and 1 for 2.6 s"
    )


def test_two_bad_links_cost_the_rank_that_has_both() -> None:
    hears = whole(4)
    hears[0] -= {1, 2}
    hears[1] -= {0}
    hears[2] -= {0}
    assert lost_ranks(hears, set(range(4))) == {0}


@pytest.mark.parametrize(("share", "named"), [(0.97, True), (0.5, False), (None, False)])
def test_memory_near_its_limit_is_named_as_the_cause(share: float | None, named: bool) -> None:
    verdict = diagnose({0: {0}}, {0, 1}, seen(2, share))
    assert verdict is not None
    assert ("97% of its limit" in verdict.sentence) is named
    assert verdict.lost[0].step == 17


def test_a_verdict_survives_the_wire() -> None:
    verdict = diagnose({0: {0}}, {0, 1}, seen(2))
    assert verdict is not None
    assert Verdict.from_json(verdict.to_json() | {"lost": [asdict(lost) for lost in verdict.lost]}) == verdict


def test_ranks_are_named_in_words() -> None:
    assert [name_ranks(ranks) for ranks in ([2], [3, 1], {0, 1, 2})] == ["rank 2", "ranks 1 and 3", "ranks 0, 1 and 2"]


def test_ranks_that_the_kernel_killed_are_named_even_by_one_survivor_of_many() -> None:
    last = seen(4)
    last |= {rank: replace(last[rank], killed=True) for rank in (1, 3)}
    verdict = diagnose({0: {0}, 2: {2}}, {0, 1, 2, 3}, last)
    assert verdict is not None
    assert [lost.rank for lost in verdict.lost] == [1, 3]
    assert verdict.sentence.count("killed by the OOM killer") == 2
    alone = diagnose({0: {0}}, {0, 1, 2, 3}, last | {2: replace(last[2], killed=True)})
    assert alone is not None
    assert [lost.rank for lost in alone.lost] == [1, 2, 3]
