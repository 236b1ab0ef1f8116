"""From whom a rank parts, once ranks may leave, and what it forgets of them; the processes are in test_leaving.py."""

from typing import cast

from distlab.cluster.heartbeat import Hearing, Post
from distlab.cluster.lost_ranks import LastReport, Verdict
from distlab.cluster.shutdown import GONE_S, Parting
from distlab.report.records import Lost


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
