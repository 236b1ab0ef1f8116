"""How ranks end: one verdict for all, goodbyes, from whom a rank parts, and what one that raised says."""

import errno
import json
import os
import random
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from distlab.cluster import ClusterError
from distlab.cluster.heartbeat import Hearing, LastReport, Post, RunPosition, Verdict
from distlab.cluster.heartbeat_helper import PERIOD_S
from distlab.cluster.shutdown import AFTER, GONE_S, Agreement, Goodbye, Parting, failed
from distlab.config import ConfigError
from distlab.report.records import Lost, Said
from distlab.report.run_folder import Journal, Unwritable
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


class Leaving:
    """One rank that has come to its end, or will: what it knows, and what it said."""

    def __init__(self, rank: int) -> None:
        self.said: list[str] = []
        self.hearing = Hearing(rank, range(3), LOST_AFTER_S, 0.0)
        self.goodbye = Goodbye(rank, self.hearing, self.said.append)

    def goes(self, now: float) -> bool:
        return self.goodbye.heard(now, end_by=1e9, committed=True)

    def hears(self, *others: "Leaving", now: float) -> None:
        for other in others:
            self.hearing.take(other.hearing.beat(RunPosition(), None, now), now)


def test_a_rank_goes_once_all_have_heard_its_goodbye_and_rank_0_once_it_has_theirs() -> None:
    zero, one, two = (Leaving(rank) for rank in range(3))
    assert not one.goes(1.0)
    zero.hears(one, now=1.0)
    two.hears(one, now=1.0)
    one.hears(zero, two, now=1.0)
    assert one.goes(1.0), "who goes on has heard it"
    assert not zero.goes(1.0)
    two.hears(zero, now=1.0)
    zero.hears(two, now=1.0)
    assert not zero.goes(1.0), "rank 0 waits for the goodbye of rank 2, which has heard its own"


def test_nobody_waits_for_a_rank_that_has_gone() -> None:
    zero, one, two = (Leaving(rank) for rank in range(3))
    for rank in (one, two):
        rank.goes(1.0)
    zero.hears(one, two, now=1.0)
    for rank, other in ((one, two), (two, one)):
        rank.hears(zero, other, now=1.0)
    one.hears(two, now=1.0)
    assert one.goes(1.0) and two.goes(1.0)
    zero.hears(one, two, now=1.0)  # their last beats; rank 0 still prints its verdict
    assert zero.goes(1.25), "they answer no goodbye any more"
    assert zero.said == [] and zero.goodbye.outlived == set()


def test_who_hears_of_it_by_a_third_does_not_wait_either() -> None:
    zero, one, two = (Leaving(rank) for rank in range(3))
    one.goodbye.leave()
    two.hears(one, now=1.0)
    two.goodbye.leave()
    zero.hears(two, now=1.0)
    assert zero.goes(1.25)


def test_who_falls_silent_without_a_goodbye_is_waited_for_and_named() -> None:
    zero, one, two = (Leaving(rank) for rank in range(3))
    one.goodbye.leave()
    zero.hears(one, two, now=1.0)
    assert not zero.goes(1.0 + LOST_AFTER_S)
    assert zero.goes(1.1 + LOST_AFTER_S)
    assert zero.said == [f"rank 2 lost: {AFTER}"]
    assert zero.goodbye.outlived == {2}


def verdict_on(*ranks: int, exit_code: int = 3) -> Verdict:
    return Verdict(exit_code, f"ranks {ranks} lost", tuple(Lost(rank, 4, "no heartbeat") for rank in ranks))


class Parted:
    """Rank 1 of four, and what it told, said and left."""

    def __init__(self) -> None:
        self.told: list[Verdict] = []
        self.said: list[str] = []
        self.left: list[int] = []
        self.hearing = Hearing(1, range(4), 2.5, 7.0)
        self.addresses = {rank: ("10.0.0.1", rank) for rank in (0, 2, 3)}
        self.parting = Parting(self.hearing, cast(Post, self), self.said.append)

    def tell_verdict(self, verdict: Verdict, stopped: bool) -> None:
        """As the post does."""
        assert not stopped
        self.told.append(verdict)


def test_nobody_may_leave_until_it_is_allowed() -> None:
    one = Parted()
    assert not one.parting.allows(verdict_on(2))
    assert not one.parting.part(verdict_on(2))
    assert set(one.addresses) == {0, 2, 3}


def test_a_loss_that_ends_the_run_is_that_of_rank_0_or_of_this_rank_or_a_refusal() -> None:
    one = Parted()
    one.parting.on_left = lambda lost: one.left.append(lost.rank)
    assert one.parting.allows(verdict_on(2, 3))
    for verdict in (verdict_on(0), verdict_on(2, 1), verdict_on(2, exit_code=2), verdict_on()):
        assert not one.parting.allows(verdict)


def test_who_left_is_told_of_once_and_forgotten() -> None:
    one = Parted()
    one.parting.on_left = lambda lost: one.left.append(lost.rank)
    assert one.parting.part(verdict_on(2))
    assert not one.parting.part(verdict_on(2)), "an echo"
    assert (one.left, one.told, one.said) == ([2], [verdict_on(2)], ["ranks (2,) lost; the remaining ranks continue"])
    assert one.parting.heard_at == {2: 7.0}
    assert one.hearing.present() == {0, 1, 3}
    assert set(one.addresses) == {0, 3}


def test_what_others_say_of_the_life_before_is_not_believed_of_who_has_come_back() -> None:
    one = Parted()
    assert not one.parting.of_a_former_life(verdict_on(2), 50.0)
    one.parting.taken_in(2, 50.0)
    assert one.parting.of_a_former_life(verdict_on(2), 50.2)
    assert not one.parting.of_a_former_life(verdict_on(2), 50.0 + GONE_S), "it has died once more"
    assert not one.parting.of_a_former_life(verdict_on(2, 3), 50.2), "another one was lost with it"
    assert not one.parting.of_a_former_life(verdict_on(), 50.2), "a refusal names nobody"


class Free(Parted):
    """Rank 1 of four, of which nobody is needed; ranks in `dead` have hung up."""

    def __init__(self, *dead: int) -> None:
        super().__init__()
        self.parting.on_left = lambda lost: self.left.append(lost.rank)
        self.parting.hung_up, self.parting.needed = lambda: set(dead), frozenset()


def test_where_nobody_is_needed_rank_0_may_be_lost_too() -> None:
    assert Free().parting.allows(verdict_on(0))
    assert not Free().parting.allows(verdict_on(1)), "that is this rank"


def test_of_two_halves_the_one_with_the_lowest_rank_goes_on() -> None:
    assert Free().parting.allows(verdict_on(2))
    assert not Free().parting.allows(verdict_on(0, 2)), "ranks 1 and 3 are the half without the lowest"
    assert not Free().parting.allows(verdict_on(0, 2, 3)), "three that may live on"


def test_who_has_hung_up_may_not_live_on_and_counts_for_no_half() -> None:
    assert Free(0, 2).parting.allows(verdict_on(0, 2))
    assert Free(0, 2, 3).parting.allows(verdict_on(0, 2, 3))
    assert Free(2).parting.allows(verdict_on(0, 2)), "ranks 1 and 3, and rank 0 alone is silent"


def test_who_hung_up_and_is_silent_is_gone_at_once_and_who_still_beats_is_not() -> None:
    one = Free(0, 2)
    seen = {rank: LastReport(4, "train", silent_s=1.2 if rank == 2 else 0.2) for rank in range(4)}
    verdict = one.parting.gone(seen)
    assert verdict is not None
    assert [entry.rank for entry in verdict.lost] == [2]
    assert "its connections were closed" in verdict.sentence
    assert Free().parting.gone(seen) is None


def codes(error: BaseException) -> tuple[int, int]:
    """Its own and that of the others."""
    own, told = failed(1, RunPosition(step=3, phase="flat"), error, [])
    assert own.sentence == told.sentence
    assert own.sentence.startswith("rank 1 failed at step 3 in flat: ")
    return own.exit_code, told.exit_code


def test_a_failure_is_a_loss_to_the_others() -> None:
    assert codes(ValueError("a made-up failure")) == (1, 3)
    assert codes(ClusterError("a port")) == (3, 3)
    assert codes(PermissionError(errno.EACCES, os.strerror(errno.EACCES))) == (1, 3)


def test_a_refusal_is_one_sentence_of_all_ranks() -> None:
    verdicts = [failed(rank, RunPosition(step=rank), ConfigError(["one", "two"]), []) for rank in (0, 1)]
    assert {verdict for each in verdicts for verdict in each} == {Verdict(2, "refused    one; two")}


def test_a_disk_that_is_full_ends_all_ranks_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that wait; by the error that the journal raises, and by the kernel's own."""
    journal = Journal()
    journal.open(tmp_path, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unwritable) as raised:
        journal.write(Said("a", "b"))
    assert codes(raised.value) == (1, 1)
    assert codes(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == (1, 1)
