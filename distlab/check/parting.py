"""By what two ranks parted, where one line of the script is on both: who called it, the steps and batches so far.

In a framework's loop, or a helper of the script's own, ranks that part stand in the same line. What says more is how
far each has come: a rank that has left its loop over a DataLoader has fewer batches, or has stopped by itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distlab.check.rank_state import Call, CallPlace, RankState
from distlab.cluster import name_ranks
from distlab.report.units import counted


def called_from(calls: Iterable[Call]) -> str:
    """Who called the one line that ranks call from, where that is not the same on all."""
    by_callers: dict[str, list[int]] = {}
    found = sorted(calls, key=lambda call: call.rank)
    for call in found:
        by_callers.setdefault(call.place.callers, []).append(call.rank)
    if len({call.place.line for call in found}) > 1 or len(by_callers) == 1:
        return ""
    sides = ", ".join(f"{name_ranks(ranks)} from {callers or 'the top'}" for callers, ranks in by_callers.items())
    return f"; that line is called on {sides}"


AS_MANY = "give all ranks as many batches, and let them stop, evaluate and save at the same steps"


class Parting(NamedTuple):
    """By what two ranks parted inside of one framework's call, and what to change where that is known."""

    text: str = ""
    remedy: str = ""


def parted_in_framework(cases: Sequence[RankState], waiting: int, other: int, at: Mapping[int, CallPlace]) -> Parting:
    """The steps and batches so far, and whether the loop of a rank has ended: one line of the user's says nothing of
    it."""
    here, there = (at.get(rank, CallPlace()).framework for rank in (waiting, other))
    if not here:
        waiting, other, here, there = other, waiting, there, here
    if not here or cases[other].raised is not None or here not in cases[other].frameworks:
        return parted_in_loader(cases, waiting, other) or parted_in_loader(cases, other, waiting) or Parting()
    steps = [steps_words(cases[rank]) for rank in (other, waiting)]
    if here == there:
        return Parting(
            f"; in {here} rank {other} is after {steps[0]} and rank {waiting} after {steps[1]}: a batch, a stop, an"
            " evaluation, a metric or a save that one of them alone has",
            AS_MANY,
        )
    return Parting(
        f"; rank {other}'s loop in {here} ended after {steps[0]}, rank {waiting} is at {steps[1]}: uneven data, or a"
        " stop decided on one rank",
        AS_MANY,
    )


def parted_in_loader(cases: Sequence[RankState], waiting: int, other: int) -> Parting | None:
    """Of a script's own loops: that a rank has taken fewer batches of one pass over its DataLoader, or is through with
    it before another."""
    theirs, mine = cases[other].batches, cases[waiting].batches
    if theirs is None or mine is None or theirs.turn != mine.turn or theirs.taken > mine.taken:
        return None
    how = "'s loop ended" if theirs.ended else " went on"
    so_far = f"; rank {other}{how} after {steps_words(cases[other])}"
    if theirs.taken < mine.taken:
        return Parting(f"{so_far}, and rank {waiting} has taken {counted(mine.taken, 'batches')}", AS_MANY)
    if theirs.ended and not mine.ended:
        what = f"a batch that rank {other} skips, or a call that rank {waiting} alone makes"
        return Parting(f"{so_far}, and rank {waiting} is still in its own: {what}", AS_MANY)
    return None


def steps_words(case: RankState) -> str:
    """ "9 optimizer steps / 9 batches of its DataLoader"."""
    batches = f" / {counted(case.batches.taken, 'batches')} of its DataLoader" if case.batches is not None else ""
    return counted(case.steps, "optimizer steps") + batches
