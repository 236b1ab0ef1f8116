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
from distlab.tools.check.judge.framework_remedies import AS_MANY, SKIPPED, STOPPED, UNEVEN, cause_remedy
from distlab.tools.check.judge.progress import History, Pass, Progress
from distlab.tools.check.judge.rank_state import Call, CallPlace, RankState, ranks_by
from distlab.tools.check.judge.source_lines import is_within, loop_at

FEW = 4  # batches per skipped one, at least, for a question about it


def called_from(calls: Iterable[Call]) -> str:
    """Return who called the one line of several ranks, if the callers differ."""
    places = {call.rank: call.place for call in calls}
    by_callers = ranks_by({rank: place.callers for rank, place in places.items()})
    if len({place.line for place in places.values()}) > 1 or len(by_callers) == 1:
        return ""
    sides = ", ".join(f"from {callers or 'the top'} on {name_ranks(ranks)}" for callers, ranks in by_callers.items())
    return f"; that line is called {sides}"


class Side(NamedTuple):
    """A rank at its divergence from another, and its progress."""

    rank: int
    history: History
    place: CallPlace
    reached: Progress


class Divergence(NamedTuple):
    """Why two ranks diverged, and the remedy, if known."""

    text: str = ""
    remedy: str = ""


def explain_divergence(states: Sequence[RankState], waiting: int, other: int, calls: Mapping[int, Call]) -> Divergence:
    """Return what is known of two ranks' divergence, each at one of these calls or after all of them."""
    one, two = (side_of(states[rank], calls.get(rank)) for rank in (waiting, other))
    if not one.place.framework:
        one, two = two, one
    cause, why = cause_of(one, two)
    remedy = cause_remedy(one.history.package or one.place.package, cause) or AS_MANY
    loop = one.place.framework
    if not loop or loop not in (one.history.loop, two.history.loop) or states[two.rank].raised is not None:
        so_far = loader_divergence(one, two) or loader_divergence(two, one)
        return Divergence(so_far + (f"; {why}" if why else ""), remedy) if so_far or why else Divergence()
    if two.place.framework == loop:
        return Divergence(
            f"; in {loop} rank {two.rank} is after {two.reached.text} and rank {one.rank} after {one.reached.text}: "
            + (why or "only one of them has a batch, a stop, an evaluation, a metric or a save here"),
            remedy,
        )
    return Divergence(
        f"; rank {two.rank}'s loop in {loop} ended after {two.reached.text}, rank {one.rank} is at {one.reached.text}: "
        + (why or "uneven data, or a stop decided on one rank"),
        remedy,
    )


def side_of(state: RankState, call: Call | None) -> Side:
    place, reached = (call.place, call.reached) if call is not None else (CallPlace(), state.history.now)
    return Side(state.rank, state.history, place, reached)


def loader_divergence(one: Side, two: Side) -> str:
    """Return for a script's own loop that a rank has had fewer batches of a pass over its DataLoader, or has finished
    it before the other."""
    if not one.history.passes or not two.history.passes:
        return ""
    mine, theirs = (side.history.passes[max(side.history.passes)] for side in (one, two))
    if mine.key != theirs.key or theirs.num_read > mine.num_read:
        return ""
    how = "'s loop ended" if theirs.ended else " went on"
    so_far = f"; rank {two.rank}{how} after {two.reached.text}"
    if theirs.num_read < mine.num_read:
        return f"{so_far}, and rank {one.rank} has read {counted(mine.num_read, 'batches')}"
    if theirs.ended and not mine.ended:
        what = f"rank {two.rank} skipped a batch, or only rank {one.rank} makes a call"
        return f"{so_far}, and rank {one.rank} is still in its loop: {what}"
    return ""


def cause_of(one: Side, other: Side) -> tuple[str, str]:
    """Return why the two diverged before their calls differed, with its text; empty if not known."""
    for a, b in ((one, other), (other, one)):
        for here, there in common_passes(a.history, b.history):
            if there.is_complete and max(here.num_read, here.length) > there.num_read:
                had = f"{there.words} has {counted(there.num_read, 'batches')} on rank {b.rank}"
                return UNEVEN, f"{had} and more on rank {a.rank}: uneven data"
    if (skipped := skipped_batch(one, other)) is not None:
        return SKIPPED, skipped
    for a, b in ((one, other), (other, one)):
        for here, there in common_passes(a.history, b.history):
            if not there.is_complete and here.num_read >= there.num_read and has_left(here, there, a, b):
                left = f"rank {b.rank} read {counted(there.num_read, 'batches')} of {there.words}"
                return STOPPED, f"{left}, which has more: a stop decided on one rank"
    return "", ""


def common_passes(one: History, other: History) -> Iterator[tuple[Pass, Pass]]:
    """Yield passes with equal number and line, the newest first."""
    others = {each.key: each for each in other.passes.values()}
    for here in reversed(one.passes.values()):
        if here.key in others:
            yield here, others[here.key]


def skipped_batch(one: Side, other: Side) -> str | None:
    """Return the first batch at which one of two ranks had made fewer backward passes."""
    for here, there in reversed(list(common_passes(one.history, other.history))):
        for index, (made, theirs) in enumerate(zip(since_begin(here), since_begin(there), strict=False)):
            if made != theirs:
                less, more = (one, other) if made < theirs else (other, one)
                return (
                    f"rank {less.rank} skipped a batch: before batch {index} of {here.words} it had called"
                    f" backward {counted(min(made, theirs), 'times')}, and rank {more.rank} {max(made, theirs)}"
                )
    if one.history.idle_steps != other.history.idle_steps:
        less = max(one, other, key=lambda side: side.history.idle_steps)
        return (
            f"rank {less.rank} skipped a batch: it made {counted(less.history.idle_steps, 'steps')} without calling"
            " backward"
        )
    return None


def since_begin(found: Pass) -> list[int]:
    """Return the backward passes from its start to each of its batches."""
    return [each - found.backwards[0] for each in found.backwards]


def has_left(here: Pass, there: Pass, a: Side, b: Side) -> bool:
    """Return whether rank b has left the pass that rank a is in."""
    newest, theirs = (side.history.passes[max(side.history.passes)] for side in (a, b))
    if b.place.called_by or a.place.called_by or newest is not here:
        return False  # in a user's function called by a framework's loop, or in an evaluation
    loop = b.history.loop
    if loop and loop == a.place.framework:
        return b.place.framework != loop or here.num_read > there.num_read or theirs is not there
    around = loop_at(CallPlace(there.line, "", there.file))
    return around is not None and is_within(a.place, around) and not is_within(b.place, around)


def questions(histories: Sequence[History]) -> Iterator[str]:
    """Yield for a run without findings whether a rank was meant to skip a batch."""
    sides = [Side(rank, history, CallPlace(), history.now) for rank, history in enumerate(histories)]
    for other in sides[1:]:
        skipped = skipped_batch(sides[0], other)
        if skipped is not None and is_exception(sides[0].history, other.history):
            remedy = cause_remedy(other.history.package, SKIPPED)
            yield f"{skipped}; is that intended? Its gradients then count less; {remedy or AS_MANY}"
            return


def is_exception(one: History, other: History) -> bool:
    """Return whether ranks with different numbers of backward passes have nearly equally many."""
    num_read = min(sum(each.num_read for each in history.passes.values()) for history in (one, other))
    apart = abs(one.now.backwards - other.now.backwards)
    return 0 < apart * FEW <= min(num_read, one.now.backwards, other.now.backwards)
