"""Who waits for whom: ranks that wait for nobody but each other, or for one that has ended, are hung.

A rank that waits hangs if a rank that it needs hangs or is over. So begin with all that wait, and take away who needs
none of those and none that is over; whoever is left never goes on (the circular wait of Coffman, Elphick, Shoshani
1971). A rank that computes, or sleeps, holds the others up and hangs nobody.
"""

from collections.abc import Sequence
from typing import NamedTuple

from workers.check.bedside import how_it_ended
from workers.check.casebook import MADE, Call, Case, Wait, group_words, words
from workers.check.finding import HANG, Finding
from workers.check.matching import Matching
from workers.check.stacks import Frame
from workers.cluster import name_ranks

SURE_AFTER_S = 1.0  # of a rank that waits for one which is over: what it told last may be on its way
OWN = "workers/check/"
MOST_NAMED = 8  # ranks of a circle


class Standing(NamedTuple):
    """What a rank waits in, and the ranks that have to come; one of them is enough (`any_of`) for a store's key or a
    receive from any rank."""

    wait: Wait
    needs: frozenset[int]
    any_of: bool


def standings(cases: Sequence[Case], matching: Matching) -> dict[int, Standing]:
    """Of the ranks that wait for another."""
    found = {}
    for case in cases:
        wait = case.waiting(matching.absent)
        if wait is None:
            continue
        if wait.call is None:
            found[case.rank] = Standing(wait, frozenset(range(len(cases))) - {case.rank}, any_of=True)
        elif needs := matching.absent(wait.call):
            any_of = wait.call.kind.op == "recv" and wait.call.kind.peer < 0
            found[case.rank] = Standing(wait, frozenset(needs), any_of)
    return found


def hung(waits: dict[int, Standing], over: set[int]) -> dict[int, Standing]:
    """Those of the waits that nothing can end."""
    left = dict(waits)
    while True:
        never = over | set(left)
        freed = [
            rank for rank, each in left.items() if not (each.needs <= never if each.any_of else each.needs & never)
        ]
        if not freed:
            return left
        for rank in freed:
            del left[rank]


class Waiting:
    """Looks at the waits again and again; `hang_after_s` is for how long nothing may move."""

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self._since: dict[int, tuple[object, float]] = {}

    def look(self, cases: Sequence[Case], matching: Matching, now: float) -> Finding | None:
        """The hang, once it has stood for long enough."""
        waits = standings(cases, matching)
        over = {case.rank for case in cases if case.over}
        stuck = hung(waits, over)
        for rank in [rank for rank in self._since if rank not in stuck]:
            del self._since[rank]
        for rank, each in stuck.items():
            mark = id(each.wait.call) if each.wait.call is not None else each.wait
            if self._since.get(rank, (None, 0.0))[0] != mark:
                self._since[rank] = mark, now
        if not stuck:
            return None
        ended = any(each.needs & over for each in stuck.values())
        moved = max(since for _, since in self._since.values())
        if now - moved < (min(SURE_AFTER_S, self._hang_after_s) if ended else self._hang_after_s):
            return None
        return diagnosis(cases, matching, waits, stuck)


def diagnosis(
    cases: Sequence[Case], matching: Matching, waits: dict[int, Standing], stuck: dict[int, Standing]
) -> Finding:
    """The hang in a sentence: who waits in which call for whom, and where that one is instead."""
    first = stuck[min(stuck, key=lambda rank: (stuck[rank].any_of, rank))]  # the same in each run, whoever came first
    together = sorted(rank for rank, each in stuck.items() if met_in(each.wait) == met_in(first.wait))
    whom = sorted(first.needs)
    called = first.wait.what if first.wait.call is None else in_group(first.wait.call, len(cases))
    where = " and ".join(dict.fromkeys(str(stuck[rank].wait.place) for rank in together))
    alone = len(together) == 1
    sentence = f"{name_ranks(together)} {'waits' if alone else 'wait'} in {called} at {where}"
    if first.wait.call is None:
        sentence += ", which no other rank can end"
    else:
        sentence += f" for {name_ranks(whom)}"
    chain = list(whom)
    for rank in chain:  # it grows: who is waited for may wait itself
        more = sorted(waits[rank].needs) if rank in waits and not waits[rank].any_of else []
        chain += [each for each in more if each not in (*chain, *together)]
    others = [elsewhere(cases[rank], matching, first.wait, waits, len(cases)) for rank in chain[:MOST_NAMED]]
    sentence += f": {'; '.join(dict.fromkeys(others))}"
    sentence += matching.parted(first.wait.call.group) if first.wait.call is not None else ""
    sentence += circle(first, stuck)
    return Finding(HANG, sentence, tuple(whom), table(cases, waits), ends=True)


def met_in(wait: Wait) -> object:
    """The same for all that wait in the same call of the same group."""
    return (
        (wait.call.group, wait.call.turn)
        if wait.call is not None and wait.call.kind.op not in ("send", "recv")
        else wait
    )


def in_group(call: Call, world_size: int) -> str:
    """The call with its group."""
    if call.kind.op in ("send", "recv"):
        return words(call)
    if call.group.instance == MADE:
        return f"new_group({list(call.kind.dims[0])}), the {ordinal(call.turn)} group that is made,"
    return f"{words(call)} of {group_words(call.group, world_size)}"


def ordinal(index: int) -> str:
    """1st for 0."""
    number = index + 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def elsewhere(case: Case, matching: Matching, waited: Wait, waits: dict[int, Standing], world_size: int) -> str:
    """Where a rank is that others wait for."""
    who = f"rank {case.rank}"
    last = matching.before(waited.call.group, case.rank) if waited.call is not None else case.last
    before = f", its last call there was {words(last)} at {last.place}" if last is not None else ""
    if not before and case.last is not None:
        before = f", its last call was {words(case.last)} at {case.last.place}"
    if case.raised is not None:
        return f"{who} raised {case.raised.kind} at {case.raised.place or 'its end'}{before}"
    if case.exit_code is None and case.gone is not None:
        return f"{who} {how_it_ended(case.gone)}{before}"
    if case.over:
        return f"{who} has ended without it{before}"
    own = waits.get(case.rank)
    if own is not None:
        called = own.wait.what if own.wait.call is None else in_group(own.wait.call, world_size)
        whom = "" if own.wait.call is None else f" for {name_ranks(sorted(own.needs))}"
        return f"{who} waits in {called} at {own.wait.place}{whom}"
    return f"{who} is at {standing_at(case)}{before}"


def circle(first: Standing, stuck: dict[int, Standing]) -> str:
    """What kind of circle it is, where that has a name."""
    calls = [each.wait.call for each in stuck.values() if each.wait.call is not None]
    ops = {call.kind.op for call in calls}
    if ops == {"send"}:
        return ". Each sends first, and none receives: let one of two receive before it sends, or use isend"
    if ops == {"recv"} and len(calls) > 1:
        return ". Each receives first, and none sends"
    groups = {call.group for call in calls if call.kind.op not in ("send", "recv") and call.group.instance >= 0}
    others = [each for rank, each in stuck.items() if rank in first.needs and each.wait.call is not None]
    shared = [
        each for each in others
        if each.wait.call is not None and first.wait.call is not None
        and len(set(each.wait.call.group.ranks) & set(first.wait.call.group.ranks)) > 1
    ]  # fmt: skip
    if len(groups) > 1 and shared and ops.isdisjoint({"send", "recv"}):
        return ". They take the groups in another order"
    return ""


def standing_at(case: Case) -> str:
    """The line of the script that its main thread is in, with the innermost function below it."""
    frames = [frame for frame in case.frames() if OWN not in frame.file]
    mine = next((frame for frame in frames if not library(frame)), None)
    if mine is None:
        return frames[0].function if frames else "an unknown line"
    below = f" in {frames[0].function}" if frames[0] != mine else ""
    return f"{mine.file.rpartition('/')[2]}:{mine.line}{below}"


def how_over(case: Case) -> str:
    """How a script ended."""
    if case.exit_code is not None:
        return f"ended with code {case.exit_code}"
    return how_it_ended(case.gone or 0)


def library(frame: Frame) -> bool:
    """Whether it is no line of the user's."""
    return any(
        each in frame.file for each in ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", "/workers/")
    )


def table(cases: Sequence[Case], waits: dict[int, Standing]) -> list[list[str]]:
    """Where every rank is: its line, its call, and what it needs."""
    rows = []
    for case in cases:
        own = waits.get(case.rank)
        if own is not None:
            called = own.wait.what if own.wait.call is None else in_group(own.wait.call, len(cases))
            rows.append([f"rank {case.rank}", str(own.wait.place), called, f"for {name_ranks(sorted(own.needs))}"])
        elif case.over:
            how = f"raised {case.raised.kind}" if case.raised is not None else how_over(case)
            last = f"{words(case.last)}, its last call" if case.last is not None else "no call"
            place = case.raised.place if case.raised is not None else str(case.last.place) if case.last else ""
            rows.append([f"rank {case.rank}", place, last, how])
        else:
            rows.append([f"rank {case.rank}", standing_at(case), "no call", f"{case.cpu_share:.0%} of a core"])
    return rows
