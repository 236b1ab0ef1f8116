"""Worlds beyond one machine's eight: news go round in turns, heartbeats fit into a datagram, and one death is one
sentence."""

import random
import re
import sys
from collections.abc import Callable

import pytest

from distlab.cluster.authenticated_messages import MAX_MEMBERS, fault
from distlab.cluster.failure_detector import SETTLE_S
from distlab.cluster.heartbeat import Hearing, RunPosition
from distlab.cluster.heartbeat_helper import AT_A_TIME, PERIOD_S, hops_of, turn_of, turns_of
from distlab.cluster.lost_ranks import diagnose
from distlab.cluster.message_signer import MAX_BYTES, MessageSigner
from distlab.cluster.rendezvous_server import Claim, RendezvousServer
from tests.cluster.cluster_of_processes import Processes

LOST_AFTER_S = 2.5


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
