"""Real ranks that are killed, paused, stopped, and that raise: what every survivor says, how soon, and every exit
code."""

import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.cluster.failure_detector import FOLLOW_S
from distlab.cluster.heartbeat import SENT_TIMES
from distlab.cluster.heartbeat_helper import PERIOD_S
from distlab.cluster.watchdog import Watchdog
from tests.cluster.cluster_of_processes import Processes, Rank

NAMED_WITHIN_S = 5.0
QUICK = 2 * 10 + 2  # wake-ups of the two periods in which a rank that leaves says so ten times as often, and both ends
BEAT_BYTES = 500  # of three ranks


def running(processes: Processes, world_size: int = 3, **how: Any) -> list[Rank]:
    ranks = processes.world(world_size, **how)
    for rank in ranks:
        rank.until("(?m)^step 3$")
    return ranks


def sentence(rank: Rank, pattern: str, since: float) -> str:
    """The one line that matches, which came within the bound."""
    found = [(at, line) for at, line in rank.lines if re.search(pattern, line)]
    assert len(found) == 1, rank.text
    assert found[0][0] - since < NAMED_WITHIN_S
    assert "Traceback" not in rank.text
    return found[0][1]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all_survivors_alike(processes: Processes, victim: int) -> None:
    ranks = running(processes)
    ranks[victim].process.kill()
    killed_at = time.monotonic()
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    assert [rank.end() for rank in survivors] == [3, 3]
    said = {
        sentence(rank, rf"^rank {victim} lost at step \d+ in \w+: no heartbeat for \d\.\d s", killed_at)
        for rank in survivors
    }
    assert len(said) == 1
    assert all(f"lost [{victim}] survivors" in rank.text for rank in survivors)


def test_a_paused_rank_is_given_up_and_learns_it_when_it_wakes(processes: Processes) -> None:
    ranks = running(processes)
    ranks[1].process.send_signal(signal.SIGSTOP)
    paused_at = time.monotonic()
    assert [ranks[0].end(), ranks[2].end()] == [3, 3]
    assert len({sentence(rank, "^rank 1 lost at step", paused_at) for rank in (ranks[0], ranks[2])}) == 1
    ranks[1].process.send_signal(signal.SIGCONT)
    assert ranks[1].end() == 3
    assert "rank 1 was declared dead by the other ranks: rank 1 lost" in ranks[1].text


def test_a_short_pause_is_forgiven(processes: Processes) -> None:
    ranks = running(processes, 2, steps=60)
    ranks[1].process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    ranks[1].process.send_signal(signal.SIGCONT)
    assert [rank.end() for rank in ranks] == [0, 0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_a_stopped_rank_ends_within_a_second_and_is_named(
    processes: Processes, number: signal.Signals, code: int
) -> None:
    ranks = running(processes)
    stopped_at = time.monotonic()
    ranks[2].process.send_signal(number)
    assert ranks[2].end() == code
    assert ranks[2].ended_at - stopped_at < 1.0
    assert [rank.end() for rank in ranks[:2]] == [3, 3]
    assert len({sentence(rank, f"^rank 2 was stopped by {number.name} at step", stopped_at) for rank in ranks}) == 1


def test_sigterm_ends_a_rank_whose_main_thread_is_blocked_in_a_collective(processes: Processes) -> None:
    ranks = [processes.rank(0, 2), processes.rank(1, 2, deed="sleep")]
    ranks[0].until(r"waiting for [3-5]\.\d s .* in all_reduce")
    stopped_at = time.monotonic()
    ranks[0].process.send_signal(signal.SIGTERM)
    assert ranks[0].end() == 143
    assert ranks[0].ended_at - stopped_at < 1.0


def test_all_stopped_at_once_all_end_by_their_own_signal(processes: Processes) -> None:
    ranks = running(processes)
    for rank in ranks:
        rank.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert [rank.end() for rank in ranks] == [143, 143, 143]


def test_of_a_broken_link_all_name_the_higher_end_and_both_ends(processes: Processes) -> None:
    ranks = [processes.rank(0, 3), processes.rank(1, 3, deed="cut2"), processes.rank(2, 3, deed="cut1")]
    assert [rank.end() for rank in ranks] == [3, 3, 3]
    words = "rank 2 lost at step \\d+ in \\w+: rank 1 and rank 2 lost heartbeats from each other"
    assert len({sentence(rank, f"^{words}", 1e9) for rank in ranks[:2]}) == 1
    assert re.search(f"rank 2 was declared dead by the other ranks: {words}", ranks[2].text)


def test_of_two_that_lose_each_other_each_names_the_other_and_none_goes_on(processes: Processes) -> None:
    ranks = [processes.rank(0, 2, deed="cut1"), processes.rank(1, 2, deed="cut0")]
    assert [rank.end() for rank in ranks] == [3, 3]
    assert "rank 1 lost at step" in ranks[0].text
    assert "rank 0 lost at step" in ranks[1].text


def test_a_rank_that_raises_is_named_with_its_error(processes: Processes) -> None:
    ranks = [processes.rank(0, 3, deed="raise"), processes.rank(1, 3), processes.rank(2, 3)]
    assert [rank.end() for rank in ranks] == [1, 3, 3]
    assert (
        len(
            {
                sentence(rank, "^rank 0 failed at step 2 in compute: ValueError: a made-up failure$", 1e9)
                for rank in ranks
            }
        )
        == 1
    )


def test_a_rank_that_raises_and_freezes_still_names_the_dead_one(processes: Processes, tmp_path: Path) -> None:
    """Its peer's death closes connections, so it raises; frozen meanwhile, as on a machine with too much to do, it
    counts the silence anew, and waits for as long again."""
    ranks = processes.watches(2, tmp_path)
    ranks[1].until("watches")
    time.sleep(1.0)
    ranks[0].process.kill()
    ranks[1].tell("raise")
    time.sleep(1.0)
    ranks[1].process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    ranks[1].process.send_signal(signal.SIGCONT)
    assert ranks[1].end() == 3
    assert "verdict 3 lost [0]" in ranks[1].text


def test_a_slow_rank_is_named_and_nothing_ends(processes: Processes) -> None:
    ranks = [processes.rank(0, 2, steps=5), processes.rank(1, 2, steps=5, deed="sleep")]
    assert [rank.end() for rank in ranks] == [0, 0]
    assert re.search(
        r"waiting for [3-5]\.\d s at step 2 in all_reduce for rank 1 \(at step 2 in compute for [2-6]\.\d s\)",
        ranks[0].text,
    )
    assert "waiting for rank 0" not in ranks[1].text.partition("joined")[2]
    for rank, phase in zip(ranks, ("all_reduce", "compute"), strict=True):
        assert re.search(f"(?m)^heard of .*{phase}", rank.text), "whoever asks hears each period where the rank is"


def test_ranks_may_leave_at_different_times_and_the_watch_is_cheap(processes: Processes, tmp_path: Path) -> None:
    ranks = processes.watches(3, tmp_path)
    for rank in (ranks[0], ranks[2]):
        rank.tell("finish")
    time.sleep(3.0)  # longer than the silence of a lost rank
    ranks[1].tell("finish")
    assert [rank.end() for rank in ranks] == [0, 0, 0]
    assert ranks[2].ended_at <= ranks[1].ended_at
    for rank in ranks:
        assert "lost" not in rank.text
        told = re.search(r"woke (\d+) times in (\S+) s and sent (\d+) B", rank.text)
        assert told is not None, rank.text
        woken, seconds, sent_bytes = int(told[1]), float(told[2]), int(told[3])
        # What it costs, whatever else the machine does: a period of beats to two others, quick ones at the end.
        assert woken <= seconds / PERIOD_S + QUICK
        assert sent_bytes <= 2 * BEAT_BYTES * (woken + SENT_TIMES)


def test_a_rank_alone_ends_at_once(processes: Processes) -> None:
    assert processes.rank(0, 1, steps=3).end() == 0


@pytest.mark.parametrize(("silent", "times"), [(set(), 1), ({1}, 2)])
def test_who_meets_an_error_beside_a_silent_rank_waits_longer_for_the_verdict(silent: set[int], times: int) -> None:
    watch: Any = object.__new__(Watchdog)
    watch.config, watch._judging = SimpleNamespace(lost_after_s=0.1), SimpleNamespace(settle_s=0.1)
    watch.hearing, watch._forgiven_at = SimpleNamespace(silent=lambda now: silent), 0.0
    began, takes_s = time.monotonic(), 0.2 + FOLLOW_S + 2 * PERIOD_S
    watch._wait_for_a_verdict()
    assert times * takes_s <= time.monotonic() - began < (times + 0.9) * takes_s
