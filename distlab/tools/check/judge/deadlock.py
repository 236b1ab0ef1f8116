"""Deadlock detection: ranks that wait only for each other, or for a rank that has ended, are hung.

A waiting rank hangs if a rank that it needs hangs or has ended. So start with all waiting ranks, and remove those that
need none of the others and none that has ended; the rest can never continue (the circular wait of Coffman, Elphick,
Shoshani 1971). A rank that computes or sleeps delays others but hangs nobody.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.exceptions import how_it_ended
from distlab.tools.check.judge.matching import Matching, all_or_none, made_by_some
from distlab.tools.check.judge.parting import Parting, called_from, parted
from distlab.tools.check.judge.rank_state import (
    HANG,
    LOADERS,
    MADE,
    CallPlace,
    Finding,
    Frame,
    RankState,
    Wait,
    call_text,
    group_words,
    ranks_by,
    ranks_do,
)
from distlab.tools.check.judge.source_lines import source_line

SURE_AFTER_S = 1.0  # after a rank has ended: its last reports may be on their way
OWN = "distlab/tools/check/"
LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", "/distlab/")
MOST_NAMED = 8  # ranks listed for a circle


class Standing(NamedTuple):
    """A rank's wait, and the ranks that must come; one of them is enough (`any_of`) for a store's key or a receive from
    any rank."""

    wait: Wait
    needs: frozenset[int]
    any_of: bool


def standings(cases: Sequence[RankState], matching: Matching) -> dict[int, Standing]:
    """Return the waits of all ranks that wait for another."""
    found = {}
    for case in cases:
        wait = case.waiting(matching.absent)
        if wait is None:
            continue
        if wait.call is None:
            found[case.rank] = Standing(wait, frozenset(range(len(cases))) - {case.rank}, any_of=True)
        elif needs := matching.absent(wait.call):
            any_of = wait.call.kind.op in ("send", "recv") and wait.call.kind.peer < 0
            found[case.rank] = Standing(wait, frozenset(needs), any_of)
    return found


def hung(waits: dict[int, Standing], over: set[int]) -> dict[int, Standing]:
    """Return the waits that nothing can end."""
    left = dict(waits)
    while True:
        never = over | set(left)
        stuck = {
            rank: each for rank, each in left.items()
            if (each.needs <= never if each.any_of else each.needs & never)
        }  # fmt: skip
        if len(stuck) == len(left):
            return left
        left = stuck


def unsettled(cases: Sequence[RankState], matching: Matching) -> list[RankState]:
    """Return the ranks that may still continue: not ended, and in no call that never ends."""
    stuck = hung(standings(cases, matching), {case.rank for case in cases if case.over})
    left = [case for case in cases if not case.over and case.rank not in stuck]
    return [case for case in left if case.waiting(matching.is_apart) is None]


class Waiting:
    """Checks the waits repeatedly; `hang_after_s` is how long nothing may change."""

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self._since: dict[int, tuple[object, float]] = {}

    def look(self, cases: Sequence[RankState], matching: Matching, now: float) -> Finding | None:
        """Return the hang, once it has lasted long enough."""
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
    cases: Sequence[RankState], matching: Matching, waits: dict[int, Standing], stuck: dict[int, Standing]
) -> Finding:
    """Return the hang as a sentence: which rank waits in which call for whom, and where that rank is instead."""
    first = stuck[min(stuck, key=lambda rank: (stuck[rank].any_of, rank))]  # the same in each run, whatever the timing
    together = sorted(rank for rank, each in stuck.items() if met_in(each.wait) == met_in(first.wait))
    whom = sorted(first.needs)
    where = " and ".join(dict.fromkeys(str(stuck[rank].wait.place) for rank in together))
    called = wait_text(first.wait, len(cases))
    sentence = f"{ranks_do(together, 'wait')} in {called} at {where}"
    if first.wait.call is None:
        sentence += ", and no other rank can unblock it"
    else:
        sentence += f" for {name_ranks(whom)}"
    chain, seen = list(whom), {*whom, *together}
    for rank in chain:  # grows: a rank that is waited for may wait itself
        more = sorted(waits[rank].needs - seen) if rank in waits and not waits[rank].any_of else []
        chain += more
        seen |= set(more)
    others = [elsewhere(cases[rank], matching, first.wait, waits, len(cases)) for rank in chain[:MOST_NAMED]]
    sentence += f": {'; '.join(dict.fromkeys(others))}"
    sentence += matching.parted(first.wait.call.group) if first.wait.call is not None else ""
    if first.wait.call is not None:
        own = {rank: each.wait.call for rank, each in waits.items() if each.wait.call is not None}
        sentence += called_from(own[rank] for rank in (together[0], whom[0]) if rank in own)
    way = parting(cases, matching, waits, together[0], whom[0])
    sentence += way.text
    sentence += circle(first, stuck) or f"; {way.remedy or way_out(first, waits, cases)}"
    return Finding(HANG, sentence, tuple(whom), table(cases, waits), ends=True)


def parting(
    cases: Sequence[RankState], matching: Matching, waits: Mapping[int, Standing], waiting: int, other: int
) -> Parting:
    """Return the first known reason why two ranks diverged: two threads, a branch, steps and batches."""
    calls = {rank: each.wait.call for rank, each in waits.items() if each.wait.call is not None}
    call = calls.get(waiting)
    if call is None:
        return Parting()
    found = matching.shared_by_threads(call.group)
    if not found.remedy and cases[other].raised is None:
        found = made_by_some(call, calls.get(other))
    return found if found.remedy else parted(cases, waiting, other, calls)


def met_in(wait: Wait) -> object:
    """Return a key that is equal for all waits in the same call of a group."""
    if wait.call is None or wait.call.kind.op in ("send", "recv"):
        return wait
    return wait.call.group, wait.call.turn


def wait_text(wait: Wait, world_size: int) -> str:
    """Return the awaited thing, a call with its group."""
    call = wait.call
    if call is None:
        return wait.what
    if call.kind.op in ("send", "recv"):
        return call_text(call)
    if call.group.instance == MADE and not call.kind.dims:  # known only by a stack
        return call.kind.op
    if call.group.instance == MADE:
        return f"new_group({list(call.kind.dims[0])}), the {ordinal(call.turn)} group that is made,"
    return f"{call_text(call)} of {group_words(call.group, world_size)}"


def ordinal(index: int) -> str:
    """Return "1st" for 0."""
    number = index + 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def elsewhere(case: RankState, matching: Matching, waited: Wait, waits: dict[int, Standing], world_size: int) -> str:
    who = f"rank {case.rank}"
    last = matching.before(waited.call.group, case.rank) if waited.call is not None else case.last
    before = f", its last call there was {call_text(last)} at {last.place}" if last is not None else ""
    if not before and case.last is not None:
        before = f", its last call was {call_text(case.last)} at {case.last.place}"
    if case.raised is not None:
        return f"{who} raised {case.raised.kind} at {case.raised.place or 'its end'}{before}"
    if case.exit_code is None and case.gone is not None:
        return f"{who} {how_it_ended(case.gone)}{before}"
    if case.missing:
        return f"{who} {case.missing}"
    if case.over:
        return f"{who} has ended without it{before}"
    own = waits.get(case.rank)
    if own is not None:
        whom = "" if own.wait.call is None else f" for {name_ranks(sorted(own.needs))}"
        return f"{who} waits in {wait_text(own.wait, world_size)} at {own.wait.place}{whom}"
    return f"{who} is at {standing_at(case)}{before}"


def circle(first: Standing, stuck: dict[int, Standing]) -> str:
    """Return the kind of circle, if it has a name."""
    calls = [each.wait.call for each in stuck.values() if each.wait.call is not None]
    ops = {call.kind.op for call in calls}
    closed = len(calls) > 1 and all(each.needs <= set(stuck) for each in stuck.values())  # no rank in it has ended
    if ops == {"send"} and closed:
        return ". Each sends first, and none receives: let one of two receive before it sends, or use isend"
    if ops == {"recv"} and closed:
        return ". Each receives first, and none sends: let one of two send before it receives"
    groups = {call.group for call in calls if call.kind.op not in ("send", "recv") and call.group.instance >= 0}
    others = [each for rank, each in stuck.items() if rank in first.needs and each.wait.call is not None]
    shared = [
        each for each in others
        if each.wait.call is not None and first.wait.call is not None
        and len(set(each.wait.call.group.ranks) & set(first.wait.call.group.ranks)) > 1
    ]  # fmt: skip
    if len(groups) > 1 and shared and ops.isdisjoint({"send", "recv"}):
        return ". The ranks use these groups in different orders (deadlock): use them in the same order on all ranks"
    return ""


def way_out(first: Standing, waits: Mapping[int, Standing], cases: Sequence[RankState]) -> str:
    """Return how to change a wait that is in no named circle."""
    call, other = first.wait.call, cases[min(first.needs)]
    if call is None:
        return f"let a rank set the key of {first.wait.what} before it waits itself"
    if other.raised is not None or (other.exit_code is None and other.gone):
        return f"mend first what ended rank {other.rank}"
    if call.kind.op in ("send", "recv") and not call.place.named_call:
        return "let each send meet a recv, in the same order on both ranks"
    own = waits.get(other.rank)
    theirs = own.wait.call if own is not None else None
    if theirs is not None and theirs.place.line and call.place.below and not call.place.named_call:
        call = theirs  # such as a call in a backward pass, whose callers differ
    return all_or_none(call)


def standing_at(case: RankState) -> str:
    """Return the script's line in the main thread, with the innermost function below it."""
    return str(main_place(case))


def main_place(case: RankState) -> CallPlace:
    """Return the script's line in the main thread."""
    frames = [frame for frame in case.frames() if OWN not in frame.file]
    mine = next((frame for frame in frames if not library(frame)), None)
    if mine is None:
        return CallPlace(frames[0].function if frames else "an unknown line")
    line = f"{mine.file.rpartition('/')[2]}:{mine.line}"
    return CallPlace(line, frames[0].function if frames[0] != mine else "", mine.file)


def library(frame: Frame) -> bool:
    return any(each in frame.file for each in LIBRARIES)


def table(cases: Sequence[RankState], waits: dict[int, Standing]) -> list[list[str]]:
    rows = []
    for case in cases:
        own = waits.get(case.rank)
        if own is not None:
            called = wait_text(own.wait, len(cases))
            whom = f"for {name_ranks(sorted(own.needs))}"
            rows.append([f"rank {case.rank}", str(own.wait.place), called, whom, source_line(own.wait.place)])
        elif case.over:
            how = how_it_ended(case.gone or 0) if case.exit_code is None else f"ended with code {case.exit_code}"
            how = f"raised {case.raised.kind}" if case.raised is not None else case.missing or how
            last = f"{call_text(case.last)}, its last call" if case.last is not None else "no call"
            place = case.raised.place if case.raised is not None else str(case.last.place) if case.last else ""
            text = source_line(case.last.place) if case.last is not None and case.raised is None else ""
            rows.append([f"rank {case.rank}", place, last, how, text])
        else:
            at, called, share = main_place(case), "no call", f"{case.cpu_share:.0%} of a core"
            if not case.frames() and case.last is not None:
                at, called = case.last.place, f"{call_text(case.last)}, its last call"
            rows.append([f"rank {case.rank}", str(at), called, share, source_line(at)])
    return rows


# Hangs after mismatched calls: all ranks have called, but different calls, and none ends.
#
# gloo ends some such calls with wrong sums, and a rank reports the end of a wait only with its next call. So a rank
# counts as hung only if its main thread is in torch, without CPU time.


def standing_apart(cases: Sequence[RankState], matching: Matching) -> dict[int, Standing]:
    """Return the ranks that hang because of mismatched calls, with those that wait for them."""
    apart = {}
    for case in cases:
        wait = case.waiting(matching.is_apart)
        if wait is not None and wait.call is not None and case.is_idle and stands_in_torch(case):
            others = frozenset(wait.call.group.ranks) - {case.rank}
            apart[case.rank] = Standing(wait, others, any_of=True)  # any of them may still end it
    stuck = hung(standings(cases, matching) | apart, {case.rank for case in cases if case.over})
    return stuck if set(stuck) & set(apart) else {}


def stands_in_torch(case: RankState) -> bool:
    file = case.frames()[0].file if case.frames() else ""
    return OWN in file or ("/torch/" in file and LOADERS not in file)


def apart_finding(stuck: Mapping[int, Standing], world_size: int) -> Finding:
    """Return the hang as a sentence; the mismatch and each rank's place are in the other finding."""
    by_place = ranks_by(
        {rank: f"in {wait_text(each.wait, world_size)} at {each.wait.place}" for rank, each in stuck.items()}
    )
    who = ", and ".join(f"{ranks_do(ranks, 'wait')} {where}" for where, ranks in by_place.items())
    return Finding(HANG, f"{who}: the calls do not match, so none of them ends", tuple(sorted(stuck)), ends=True)


# Ranks that others wait for and that make no call: busy or asleep they are no hang, and are named every 10 s.
#
# A rank without any CPU time for LAB_COLLECTIVE_TIMEOUT_S while others waited is blocked in something that is no call
# (a queue, a lock, a file): this is reported as such, so that a run never waits for ever.

SAY_S = 10.0
AT_WORK = 0.5  # of a core


class Still:
    """Checks repeatedly; `bound_s` is how long a rank may be idle while others wait for it."""

    def __init__(self, bound_s: float, say: Callable[[str], None]) -> None:
        self._bound_s, self._say = bound_s, say
        self._said_at: float | None = None
        self._idle_since: dict[int, float] = {}

    def _all_asleep(self, cases: Sequence[RankState], now: float) -> Finding | None:
        """Return a finding if no rank is in a call or busy."""
        left = [case for case in cases if not case.over]
        if not left or any(not case.is_idle or now - case.moved_at < self._bound_s for case in left):
            return None
        ranks = tuple(case.rank for case in left)
        where = f"at {standing_at(left[0])} for {self._bound_s:g} s"
        sentence = f"{ranks_do(ranks, 'stand')} still {where}, and no other rank is at work"
        return Finding(HANG, sentence, ranks, table(cases, {}), ends=True)

    def look(self, cases: Sequence[RankState], matching: Matching, now: float) -> Finding | None:
        """Log busy ranks at intervals; return a finding if one was idle for too long."""
        waits = standings(cases, matching)
        if (asleep := self._all_asleep(cases, now)) is not None:
            return asleep
        needed = {rank for each in waits.values() for rank in each.needs if not each.any_of}
        alone = [case for case in cases if case.rank in needed and case.rank not in waits and not case.over]
        idle = {case.rank for case in alone if case.is_idle}
        self._idle_since = {rank: self._idle_since.get(rank, now) for rank in idle}
        if not alone or hung(waits, {case.rank for case in cases if case.over}):
            self._said_at = None
            return None
        if self._said_at is None:
            self._said_at = now
        waiting = sorted(rank for rank, each in waits.items() if each.needs & {case.rank for case in alone})
        wait = waits[waiting[0]].wait
        who = f"{ranks_do(waiting, 'wait')} for it in {wait.what} at {wait.place}"
        late = [rank for rank, since in self._idle_since.items() if now - since > self._bound_s]
        if late:
            sentence = f"rank {late[0]} has been at {standing_at(cases[late[0]])} for {self._bound_s:g} s, and {who}"
            return Finding(HANG, sentence, tuple(late), table(cases, waits), ends=True)
        if now - self._said_at >= SAY_S:
            self._said_at = now
            for case in alone:
                doing = "computes" if case.cpu_share > AT_WORK else "stands"
                self._say(
                    f"no hang    rank {case.rank} {doing} at {standing_at(case)} ({case.cpu_share:.0%} of a core), and"
                    f" {who} for {now - wait.since_s:.0f} s"
                )
        return None
