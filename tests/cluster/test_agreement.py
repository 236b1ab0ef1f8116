"""One verdict for all: rounds of beats driven by hand, under any order of losses and pauses, and real processes that are
paused and killed at the lines where they disagreed."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from distlab.cluster.heartbeat import Hearing, RunPosition
from distlab.cluster.heartbeat_helper import PERIOD_S
from distlab.cluster.shutdown import Agreement
from tests.cluster.cluster_of_processes import Processes, Rank

LOST_AFTER_S, SETTLE_S = 2.5, 0.75


class Simulated:
    """One rank without sockets: what it has heard, what waits in its inbox, and how it ended."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.hearing = Hearing(rank, range(world_size), LOST_AFTER_S, 0.0)
        self.agreement = Agreement(self.hearing)
        self.inbox: list[dict[str, Any]] = []
        self.paused_until = 0.0
        self.ended = ""

    def turn(self, now: float) -> list[dict[str, Any]]:
        """What the watch does in a period: listen, adopt, look, beat; returns what it sends."""
        told, self.inbox = self.inbox, []
        for beat in told:
            if "lost" not in beat:
                self.hearing.take(beat, now)
        if any("lost" in message for message in told) and not self.agreement.committed:
            self.ended = "lost"
            return []
        self.agreement.look()
        if self.agreement.committed:
            self.ended = "stands"
        return [self.hearing.beat(RunPosition(), None, now)]

    def judge(self, now: float) -> list[dict[str, Any]]:
        """Give up who is silent for so long that all tables have settled."""
        silent = [rank for rank, peer in self.hearing.peers.items() if now - peer.heard_at > LOST_AFTER_S + SETTLE_S]
        if silent and self.agreement.bound:
            for rank in silent:
                self.hearing.forget(rank)
        elif silent and not self.ended:
            self.ended = "lost"
            return [{"lost": silent}]
        return []


def outcomes(seed: int) -> list[str]:
    """How each of two to five ranks ends: each accepts at some time, one is paused for long in the middle, beats get
    lost now and then."""
    draw = random.Random(seed)
    world_size = draw.randint(2, 5)
    ranks = [Simulated(rank, world_size) for rank in range(world_size)]
    accepts_at = [draw.uniform(0.0, 2.0) for _ in ranks]
    pauses_at = draw.uniform(0.0, 3.0)
    victim = draw.choice(ranks)
    for tick in range(80):
        now = tick * PERIOD_S
        if victim.paused_until == 0.0 and now >= pauses_at:
            victim.paused_until = now + draw.uniform(5.0, 8.0)
        for one, accepts in zip(ranks, accepts_at, strict=True):
            if now < one.paused_until or one.ended == "lost":
                continue
            if now >= accepts:
                one.agreement.accept()
            if one is victim and one.paused_until and now - PERIOD_S < one.paused_until:
                for rank in one.hearing.peers:  # it was frozen itself
                    one.hearing.peers[rank].heard_at = now
            sent = one.turn(now)
            sent += [] if one.ended == "lost" else one.judge(now)
            for other in ranks:
                if other is not one:
                    other.inbox += [message for message in sent if "lost" in message or draw.random() < 0.9]
    return [one.ended for one in ranks]


def test_all_ranks_end_alike_whenever_one_is_paused() -> None:
    ends = [tuple(sorted(set(outcomes(seed)))) for seed in range(150)]
    assert set(ends) == {("lost",), ("stands",)}, "and both happen"


def test_no_rank_commits_before_all_know_that_all_have_accepted() -> None:
    one, other = Simulated(0, 2), Simulated(1, 2)
    one.agreement.accept()
    one.turn(0.0)
    assert not one.agreement.bound and one.agreement.missing() == {1}
    other.agreement.accept()
    one.inbox += other.turn(0.0)
    one.turn(0.1)
    assert one.agreement.bound and not one.agreement.committed and one.agreement.under_way
    other.inbox += one.turn(0.2)
    one.inbox += other.turn(0.3)
    assert other.agreement.committed
    one.turn(0.4)
    assert one.agreement.committed


def test_a_rank_alone_agrees_at_once() -> None:
    one = Simulated(0, 1)
    one.turn(0.0)
    assert not one.agreement.committed
    one.agreement.accept()
    one.turn(0.1)
    assert one.agreement.committed


def told(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def watching(processes: Processes, folder: Path, world_size: int = 3) -> list[Rank]:
    ranks = processes.watches(world_size, folder)
    for rank in ranks:
        rank.until("watches")
    ranks[0].tell("ready")
    ranks[0].until("did ready")
    return ranks


def test_a_rank_0_that_is_paused_before_all_have_agreed_is_given_up_and_writes_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    ranks = watching(processes, tmp_path)
    for rank in ranks[:2]:
        rank.tell("agree")
    ranks[0].process.send_signal(signal.SIGSTOP)
    assert [rank.end() for rank in ranks[1:]] == [3, 3]
    ranks[0].tell("publish")
    ranks[0].process.send_signal(signal.SIGCONT)
    assert ranks[0].end() == 3
    assert "rank 0 was declared dead by the other ranks: rank 0 lost" in ranks[0].text
    assert "published" not in ranks[0].text
    assert told(tmp_path) == {"verdict": "lost", "by": 1}


def test_a_rank_0_that_is_paused_once_all_have_agreed_changes_nothing(processes: Processes, tmp_path: Path) -> None:
    ranks = watching(processes, tmp_path)
    for rank in ranks:
        rank.tell("agree")
    ranks[0].until("did agree")
    ranks[0].process.send_signal(signal.SIGSTOP)
    for rank in ranks:
        rank.tell("finish")
    assert [rank.end() for rank in ranks[1:]] == [0, 0]
    assert all("rank 0 lost: after the verdict, which stands" in rank.text for rank in ranks[1:])
    assert told(tmp_path) == {"verdict": "pass", "by": 0}, "another rank put it in place"
    ranks[0].process.send_signal(signal.SIGCONT)
    assert ranks[0].end() == 0
    assert told(tmp_path) == {"verdict": "pass", "by": 0}


@pytest.mark.parametrize("writer", ["killed", "paused"])
def test_when_the_one_that_writes_goes_too_the_next_survivor_writes(
    processes: Processes, tmp_path: Path, writer: str
) -> None:
    ranks = watching(processes, tmp_path, world_size=4)
    ranks[0].tell("linger 1" if writer == "paused" else "linger 30")
    ranks[0].until("did linger")
    ranks[3].process.kill()
    ranks[0].until("verdict 3 lost")
    ranks[0].process.send_signal(signal.SIGSTOP if writer == "paused" else signal.SIGKILL)
    assert [rank.end() for rank in ranks[1:3]] == [3, 3]
    assert told(tmp_path) == {"verdict": "lost", "by": 1}
    ranks[0].process.send_signal(signal.SIGCONT)
    assert ranks[0].end() == (3 if writer == "paused" else 137)
    assert told(tmp_path) == {"verdict": "lost", "by": 1}, "the first word stays"


def test_a_rank_that_finds_its_connections_closed_hears_first_why(processes: Processes, tmp_path: Path) -> None:
    ranks = watching(processes, tmp_path)
    ranks[0].process.send_signal(signal.SIGSTOP)
    assert [rank.end() for rank in ranks[1:]] == [3, 3]
    ranks[0].tell("raise")
    ranks[0].process.send_signal(signal.SIGCONT)
    assert ranks[0].end() == 3
    assert "failed" not in ranks[0].text
    assert told(tmp_path) == {"verdict": "lost", "by": 1}
