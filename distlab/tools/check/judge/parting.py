"""Explain why two ranks reached different collectives: uneven data, a skipped batch, an early exit, other callers.

In a framework's loop, or a helper of the script, diverged ranks are at the same line; and a rank with fewer batches, an
early stop or a skipped batch has diverged before any call differs. A pass over a DataLoader is identified by its line
and its number there, equal on all ranks until they diverge: at the same batch of a pass ranks have made equally many
backward passes, unless one skipped a batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from distlab.lab.cluster import name_ranks
from distlab.lab.report.units import counted
from distlab.tools.check.judge.framework_words import AS_MANY, SKIPPED, STOPPED, UNEVEN, words_of_cause
from distlab.tools.check.judge.progress import Course, Pass, Progress
from distlab.tools.check.judge.rank_state import Call, CallPlace, RankState, ranks_by
from distlab.tools.check.judge.source_lines import is_within, loop_at

FEW = 4  # batches per skipped one, at least, for a question about it


def called_from(calls: Iterable[Call]) -> str:
    """Return who called the one line of several ranks, if the callers differ."""
    places = {call.rank: call.place for call in calls}
    by_callers = ranks_by({rank: place.callers for rank, place in places.items()})
    if len({place.line for place in places.values()}) > 1 or len(by_callers) == 1:
        return ""
    sides = ", ".join(f"{name_ranks(ranks)} from {callers or 'the top'}" for callers, ranks in by_callers.items())
    return f"; that line is called on {sides}"


class Side(NamedTuple):
    """A rank at its divergence from another, and its progress."""

    rank: int
    course: Course
    place: CallPlace
    reached: Progress


class Parting(NamedTuple):
    """Why two ranks diverged, and the remedy, if known."""

    text: str = ""
    remedy: str = ""


def parted(cases: Sequence[RankState], waiting: int, other: int, calls: Mapping[int, Call]) -> Parting:
    """Return what is known of two ranks' divergence, each at one of these calls or after all of them."""
    one, two = (side_of(cases[rank], calls.get(rank)) for rank in (waiting, other))
    if not one.place.framework:
        one, two = two, one
    cause, why = cause_of(one, two)
    remedy = words_of_cause(one.course.package or one.place.package, cause) or AS_MANY
    loop = one.place.framework
    if not loop or loop not in (one.course.loop, two.course.loop) or cases[two.rank].raised is not None:
        so_far = parted_in_loader(one, two) or parted_in_loader(two, one)
        return Parting(so_far + (f"; {why}" if why else ""), remedy) if so_far or why else Parting()
    if two.place.framework == loop:
        return Parting(
            f"; in {loop} rank {two.rank} is after {two.reached.text} and rank {one.rank} after {one.reached.text}: "
            + (why or "a batch, a stop, an evaluation, a metric or a save that one of them alone has"),
            remedy,
        )
    return Parting(
        f"; rank {two.rank}'s loop in {loop} ended after {two.reached.text}, rank {one.rank} is at {one.reached.text}: "
        + (why or "uneven data, or a stop decided on one rank"),
        remedy,
    )


def side_of(case: RankState, call: Call | None) -> Side:
    place, reached = (call.place, call.reached) if call is not None else (CallPlace(), case.course.now)
    return Side(case.rank, case.course, place, reached)


def parted_in_loader(one: Side, two: Side) -> str:
    """Return for a script's own loop that a rank has had fewer batches of a pass over its DataLoader, or has finished
    it before the other."""
    if not one.course.passes or not two.course.passes:
        return ""
    mine, theirs = (side.course.passes[max(side.course.passes)] for side in (one, two))
    if mine.key != theirs.key or theirs.drawn > mine.drawn:
        return ""
    how = "'s loop ended" if theirs.ended else " went on"
    so_far = f"; rank {two.rank}{how} after {two.reached.text}"
    if theirs.drawn < mine.drawn:
        return f"{so_far}, and rank {one.rank} has taken {counted(mine.drawn, 'batches')}"
    if theirs.ended and not mine.ended:
        what = f"a batch that rank {two.rank} skips, or a call that rank {one.rank} alone makes"
        return f"{so_far}, and rank {one.rank} is still in its own: {what}"
    return ""


def cause_of(one: Side, other: Side) -> tuple[str, str]:
    """Return why the two diverged before their calls differed, with its text; empty if not known."""
    for a, b in ((one, other), (other, one)):
        for here, there in common(a.course, b.course):
            if there.has_all and max(here.drawn, here.length) > there.drawn:
                had = f"{there.words} has {counted(there.drawn, 'batches')} on rank {b.rank} and more on rank {a.rank}"
                return UNEVEN, f"{had}: uneven data"
    if (skipped := skipped_batch(one, other)) is not None:
        return SKIPPED, skipped
    for a, b in ((one, other), (other, one)):
        for here, there in common(a.course, b.course):
            if not there.has_all and here.drawn >= there.drawn and has_left(here, there, a, b):
                left = f"rank {b.rank} took {counted(there.drawn, 'batches')} of {there.words}"
                return STOPPED, f"{left}, which has more: a stop decided on one rank"
    return "", ""


def common(one: Course, other: Course) -> Iterator[tuple[Pass, Pass]]:
    """Yield passes with equal number and line, the newest first."""
    others = {each.key: each for each in other.passes.values()}
    for here in reversed(one.passes.values()):
        if here.key in others:
            yield here, others[here.key]


def skipped_batch(one: Side, other: Side) -> str | None:
    """Return the first batch at which one of two ranks had made fewer backward passes."""
    for here, there in reversed(list(common(one.course, other.course))):
        for index, (made, theirs) in enumerate(zip(since_begin(here), since_begin(there), strict=False)):
            if made != theirs:
                less, more = (one, other) if made < theirs else (other, one)
                return (
                    f"rank {less.rank} skipped a batch: when it came to batch {index} of {here.words} it had called"
                    f" backward {counted(min(made, theirs), 'times')} in it, and rank {more.rank} {max(made, theirs)}"
                )
    if one.course.idle != other.course.idle:
        less = max(one, other, key=lambda side: side.course.idle)
        return (
            f"rank {less.rank} skipped a batch: it made {counted(less.course.idle, 'steps')} without calling backward"
        )
    return None


def since_begin(found: Pass) -> list[int]:
    """Return the backward passes from its start to each of its batches."""
    return [each - found.backwards[0] for each in found.backwards]


def has_left(here: Pass, there: Pass, a: Side, b: Side) -> bool:
    """Return whether rank b has left the pass that rank a is in."""
    newest, theirs = (side.course.passes[max(side.course.passes)] for side in (a, b))
    if b.place.called_by or a.place.called_by or newest is not here:
        return False  # in a user's function called by a framework's loop, or in an evaluation
    loop = b.course.loop
    if loop and loop == a.place.framework:
        return b.place.framework != loop or here.drawn > there.drawn or theirs is not there
    around = loop_at(CallPlace(there.line, "", there.file))
    return around is not None and is_within(a.place, around) and not is_within(b.place, around)


def questions(courses: Sequence[Course]) -> Iterator[str]:
    """Yield for a run without findings whether a rank was meant to skip a batch."""
    sides = [Side(rank, course, CallPlace(), course.now) for rank, course in enumerate(courses)]
    for other in sides[1:]:
        skipped = skipped_batch(sides[0], other)
        if skipped is not None and is_exception(sides[0].course, other.course):
            remedy = words_of_cause(other.course.package, SKIPPED)
            yield f"{skipped}; is that intended? Its gradients then count for less; {remedy or AS_MANY}"
            return


def is_exception(one: Course, other: Course) -> bool:
    """Return whether ranks with different numbers of backward passes have nearly equally many."""
    drawn = min(sum(each.drawn for each in course.passes.values()) for course in (one, other))
    apart = abs(one.now.backwards - other.now.backwards)
    return 0 < apart * FEW <= min(drawn, one.now.backwards, other.now.backwards)
