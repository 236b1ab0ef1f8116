"""Tables of who hears whom, driven by hand: every rank's Hearing in one process, the links chosen by the test; and worlds
beyond one machine's eight."""

import random
import re
import sys
from collections.abc import Callable

import pytest

from distlab.cluster.authenticated_messages import MAX_MEMBERS, fault
from distlab.cluster.failure_detector import SETTLE_S, diagnose
from distlab.cluster.heartbeat import Hearing, RunPosition, to_mask, to_ranks
from distlab.cluster.heartbeat_helper import AT_A_TIME, PERIOD_S, hops_of, turn_of, turns_of
from distlab.cluster.message_signer import MAX_BYTES, MessageSigner
from distlab.cluster.rendezvous_server import Claim, RendezvousServer
from tests.cluster.cluster_of_processes import Processes

LOST_AFTER_S = 2.5
Link = Callable[[int, int, float], bool]


def exchange(world_size: int, link: Link, until_s: float) -> list[Hearing]:
    """All ranks beat once a period; a beat from a to b at time t arrives if link(a, b, t)."""
    hearings = [Hearing(rank, range(world_size), LOST_AFTER_S, 0.0) for rank in range(world_size)]
    for tick in range(int(until_s / PERIOD_S) + 1):
        now = tick * PERIOD_S
        beats = [hearing.beat(RunPosition(1, 7, "all_reduce", 0.0), None, now) for hearing in hearings]
        for sender in range(world_size):
            for receiver in range(world_size):
                if sender != receiver and link(sender, receiver, now):
                    hearings[receiver].take(beats[sender], now)
    return hearings


def verdicts(hearings: list[Hearing], now: float) -> list[list[int]]:
    """Whom each rank would name at `now`."""
    found = [diagnose(one.hears(now), one.present(), one.seen(RunPosition(), now)) for one in hearings]
    return [[lost.rank for lost in verdict.lost] if verdict else [] for verdict in found]


def test_a_whole_cluster_names_nobody() -> None:
    assert verdicts(exchange(4, lambda *_: True, 10.0), 10.0) == [[], [], [], []]


def test_a_rank_has_started_once_a_beat_of_it_is_known_whoever_brought_it() -> None:
    assert exchange(3, lambda *_: False, 1.0)[0].started() == set()
    hearings = exchange(3, lambda a, b, _: {a, b} != {0, 2}, 1.0)
    assert hearings[0].started() == {1, 2}


def test_one_broken_link_is_seen_by_all_alike_though_two_ranks_do_not_hear_each_other() -> None:
    hearings = exchange(4, lambda a, b, now: now < 2 or {a, b} != {1, 3}, 6.0)
    assert verdicts(hearings, 6.0) == [[3], [3], [3], [3]]


def test_a_link_broken_one_way_costs_the_unheard_end() -> None:
    hearings = exchange(3, lambda a, b, now: now < 2 or (a, b) != (0, 2), 6.0)
    assert verdicts(hearings, 6.0) == [[0], [0], [0]]


def test_a_dead_rank_is_named_by_all_within_lost_after_and_a_period() -> None:
    hearings = exchange(4, lambda a, b, now: now < 2 or 2 not in (a, b), 4.75)
    assert [verdicts(hearings, 4.75)[rank] for rank in (0, 1, 3)] == [[2], [2], [2]]


def test_halves_name_each_other() -> None:
    hearings = exchange(4, lambda a, b, now: now < 2 or (a < 2) == (b < 2), 6.0)
    assert verdicts(hearings, 6.0) == [[2, 3], [2, 3], [0, 1], [0, 1]]


def test_a_short_silence_costs_nobody() -> None:
    hearings = exchange(3, lambda a, b, now: not 2 < now < 4 or 1 not in (a, b), 8.0)
    assert verdicts(hearings, 8.0) == [[], [], []]


def test_a_rank_that_said_goodbye_may_be_silent_and_the_news_go_round() -> None:
    hearings = exchange(3, lambda *_: True, 1.0)
    hearings[2].ended |= to_mask([2])
    hearings[1].take(hearings[2].beat(RunPosition(), None, 1.0), 1.0)  # rank 0 hears of it through rank 1 alone
    hearings[0].take(hearings[1].beat(RunPosition(), None, 1.25), 1.25)
    for tick in range(6, 60):
        now = tick * PERIOD_S
        hearings[0].take(hearings[1].beat(RunPosition(), None, now), now)
        hearings[1].take(hearings[0].beat(RunPosition(), None, now), now)
    assert verdicts(hearings[:2], 14.75) == [[], []]
    assert hearings[0].present() == {0, 1}


def test_a_rank_that_was_frozen_forgives() -> None:
    hearings = exchange(3, lambda *_: True, 1.0)
    assert verdicts(hearings, 9.0)[0]
    hearings[0].forgive(9.0)
    assert verdicts(hearings, 9.0)[0] == []


def test_behind_is_who_changed_place_or_began_collectives_less_often() -> None:
    hearings = [Hearing(rank, range(3), LOST_AFTER_S, 0.0) for rank in range(3)]
    hearings[0].take(hearings[1].beat(RunPosition(9, 4, "compute", 0.0), None, 3.0), 3.0)
    hearings[0].take(hearings[2].beat(RunPosition(10, 4, "all_reduce", 3.0), None, 3.0), 3.0)
    assert hearings[0].behind(RunPosition(10, 4, "all_reduce", 0.0), 3.5) == ["rank 1 (at step 4 in compute for 3.5 s)"]
    assert hearings[0].behind(RunPosition(9, 4, "compute", 0.0), 3.5) == []
    assert hearings[0].behind(RunPosition(9, 4, "compute", 0.0, calls=1), 3.5) != []
    hearings[0].take(hearings[1].beat(RunPosition(9, 4, "compute", 0.0, calls=1), None, 3.6), 3.6)
    assert hearings[0].behind(RunPosition(9, 4, "compute", 0.0, calls=1), 3.6) == []


def test_masks() -> None:
    assert to_ranks(to_mask([0, 3, 7])) == {0, 3, 7}


def beaten(world_size: int, silent: set[int], at: float, until: float, dropped: float = 0.0) -> list[Hearing]:
    """All ranks beat in turns, out of step by chance, and a share of the beats is `dropped` on the way; those that are
    `silent` beat no more from `at` on."""
    draw = random.Random(3)
    hearings = [Hearing(rank, range(world_size), LOST_AFTER_S, 0.0) for rank in range(world_size)]
    others = [[rank for rank in range(world_size) if rank != own] for own in range(world_size)]
    for tick in range(int(until / PERIOD_S) + 1):
        now = tick * PERIOD_S
        for sender in draw.sample(range(world_size), world_size):
            if sender in silent and now >= at:
                continue
            beat = hearings[sender].beat(RunPosition(1, 7, "all_reduce", 0.0), None, now)
            for receiver in turn_of(others[sender], tick):
                if draw.random() >= dropped:
                    hearings[receiver].take(beat, now)
    return hearings


def named(hearings: list[Hearing], now: float, but: set[int]) -> set[tuple[int, ...]]:
    found = [
        diagnose(one.hears(now), one.present(), one.seen(RunPosition(), now)) for one in hearings if one.rank not in but
    ]
    return {tuple(lost.rank for lost in verdict.lost) if verdict else () for verdict in found}


def test_a_beat_goes_to_16_at_a_time_and_to_all_in_turns() -> None:
    for others, turns in ((0, 1), (7, 1), (16, 1), (17, 2), (63, 4), (1023, 64)):
        assert turns_of(others) == turns
        parts = [turn_of(range(others), turn) for turn in range(turns)]
        assert sorted(rank for part in parts for rank in part) == list(range(others))
        assert max(map(len, parts)) <= AT_A_TIME
    assert [hops_of(others) for others in (0, 7, 16, 17, 63, 256, 257, 1023)] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_64_ranks_that_beat_in_turns_lose_nobody() -> None:
    assert named(beaten(64, set(), 0.0, 12.0), 12.0, set()) == {()}


def test_a_tenth_of_all_datagrams_may_get_lost() -> None:
    """With a link given up after four beats in place of ten, 64 ranks named a live one within seconds."""
    assert named(beaten(64, set(), 0.0, 12.0, dropped=0.1), 12.0, set()) == {()}


@pytest.mark.parametrize("silent", [{0}, {5, 63}])
def test_who_dies_among_64_is_named_by_all_alike_once_the_news_had_time_to_settle(silent: set[int]) -> None:
    known_at = 4.0 + LOST_AFTER_S + SETTLE_S * hops_of(63)
    assert named(beaten(64, silent, 4.0, known_at), known_at, silent) == {tuple(sorted(silent))}
    early = 4.0 + LOST_AFTER_S - 0.5
    assert named(beaten(64, silent, 4.0, early), early, silent) == {()}


@pytest.mark.parametrize("strangeness", [lambda rank: 0, lambda rank: rank % 3, lambda rank: rank])
def test_a_beat_of_1024_ranks_fits_into_a_datagram_whoever_hears_whom(strangeness: Callable[[int], int]) -> None:
    hearing = Hearing(700, range(1024), LOST_AFTER_S, 0.0)
    for rank, row in hearing.rows.items():
        row.count, row.mask = 10**10 + rank, row.mask ^ (1 << 1023 >> strangeness(rank))
    beat = hearing.beat(RunPosition(1, 7, "all_reduce", 0.0), None, 1e7)
    assert fault(beat | {"hears": [[mask, ranks] for mask, ranks in beat["hears"]]}) == ""
    assert len(MessageSigner(b"k" * 32).seal(beat, b"the run.")) < MAX_BYTES
    assert beat["counts"][700] == 10**10, "its own row is there, whatever was left out"


def test_ranks_that_hear_differently_are_told_apart() -> None:
    one, other = (Hearing(rank, range(12), LOST_AFTER_S, 0.0) for rank in (3, 4))
    for rank, row in one.rows.items():
        row.count, row.mask = 5, rank % 4
    other.take(one.beat(RunPosition(), None, 1.0), 1.0)
    assert {rank: row.mask for rank, row in other.rows.items() if rank != 3} == {
        rank: rank % 4 for rank in range(12) if rank not in (3, 4)
    }


def test_a_board_tells_its_members_in_parts() -> None:
    claims = [Claim(rank, 150, "dp", "v", {}, f"node{rank}", 1, f"uid{rank}") for rank in range(150)]
    board = RendezvousServer(claims[0], "10.0.0.1", 4000, "dp-1", 60.0)
    for claim in claims[1:]:
        assert "wait" in board.answer(claim, "10.0.0.1", 4000 + claim.rank, 1.0)
    board.seal("0" * 16, 5000, 1.0)
    known: list[int] = []
    while len(known) < 150:
        part = board.answer(claims[7], "10.0.0.1", 4007, 1.0, None, len(known))["sealed"]["members"]
        assert 0 < len(part) <= MAX_MEMBERS
        known += [member["rank"] for member in part]
    assert known == list(range(150))


def test_64_watches_on_this_machine_end_by_one_sentence(processes: Processes) -> None:
    """With sockets, threads and helpers of their own, 64 times what a rank has."""
    world = processes.run([sys.executable, "-m", "tests.cluster.many_watches", "64", "41"], {})
    assert world.end(90) == 0
    assert "lost while all were there: []" in world.text, "a whole cluster loses nobody"
    assert "exit codes [3]" in world.text
    heard = re.findall(r"^rank (\d+) heard rank 41 lost at step 0 in start: no heartbeat for", world.text, re.MULTILINE)
    assert sorted(map(int, heard)) == [rank for rank in range(64) if rank != 41], world.text
    assert len(re.findall(" heard ", world.text)) == 63


def test_a_killed_rank_is_silent_at_once_whatever_still_arrives_of_it() -> None:
    hearing, dead = Hearing(0, range(3), 2.5, 0.0), Hearing(2, range(3), 2.5, 0.0)
    hearing.killed.add(2)
    hearing.take(dead.beat(RunPosition(1, 7, "flat"), 0.5, 0.1), 0.2)
    assert hearing.heard(0.3) == {0, 1}
    assert set(hearing.hears(0.3)) == {0, 1}
    last = hearing.seen(RunPosition(), 0.3)
    assert [rank for rank in last if last[rank].killed] == [2]
