"""Deadlock detection: ranks that wait only for each other, or for a rank that has ended, are hung.

A waiting rank hangs if a rank that it needs hangs or has ended. So start with all waiting ranks, and remove those that
need none of the others and none that has ended; the rest can never continue (the circular wait of Coffman, Elphick,
Shoshani 1971). A rank that computes or sleeps delays others but hangs nobody.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from distlab.lab.cluster import name_ranks
from distlab.tools.check.judge.divergence import Divergence, called_from, explain_divergence
from distlab.tools.check.judge.exceptions import how_it_ended
from distlab.tools.check.judge.matching import Matching, all_or_none, made_by_some
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
    group_text,
    ranks_by,
    ranks_do,
)
from distlab.tools.check.judge.source_lines import source_line

SURE_AFTER_S = 1.0  # after a rank has ended: its last reports may be on their way
OWN = "distlab/tools/check/"
LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<frozen", "/distlab/")
MOST_NAMED = 8  # ranks listed for a circle


class Blocked(NamedTuple):
    """A rank's wait, and the ranks that must come; one of them is enough (`any_of`) for a store's key or a receive from
    any rank."""

    wait: Wait
    needs: frozenset[int]
    any_of: bool


def waits_of(states: Sequence[RankState], matching: Matching) -> dict[int, Blocked]:
    """Return the waits of all ranks that wait for another."""
    found = {}
    for state in states:
        wait = state.waiting(matching.absent)
        if wait is None:
            continue
        if wait.call is None:
            found[state.rank] = Blocked(wait, frozenset(range(len(states))) - {state.rank}, any_of=True)
        elif needs := matching.absent(wait.call):
            any_of = wait.call.kind.op in ("send", "recv") and wait.call.kind.peer < 0
            found[state.rank] = Blocked(wait, frozenset(needs), any_of)
    return found


def hung(waits: dict[int, Blocked], over: set[int]) -> dict[int, Blocked]:
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


def unsettled(states: Sequence[RankState], matching: Matching) -> list[RankState]:
    """Return the ranks that may still continue: not ended, and in no call that never ends."""
    stuck = hung(waits_of(states, matching), {state.rank for state in states if state.over})
    left = [state for state in states if not state.over and state.rank not in stuck]
    return [state for state in left if state.waiting(matching.is_mismatched) is None]


class HangWatch:
    """Checks the waits repeatedly; `hang_after_s` is how long nothing may change."""

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self._since: dict[int, tuple[object, float]] = {}

    def find_hang(self, states: Sequence[RankState], matching: Matching, now: float) -> Finding | None:
        """Return the hang, once it has lasted long enough."""
        waits = waits_of(states, matching)
        over = {state.rank for state in states if state.over}
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
        return diagnosis(states, matching, waits, stuck)


def diagnosis(
    states: Sequence[RankState], matching: Matching, waits: dict[int, Blocked], stuck: dict[int, Blocked]
) -> Finding:
    """Return the hang as a sentence: which rank waits in which call for whom, and where that rank is instead."""
    first = stuck[min(stuck, key=lambda rank: (stuck[rank].any_of, rank))]  # the same in each run, whatever the timing
    together = sorted(rank for rank, each in stuck.items() if meeting_key(each.wait) == meeting_key(first.wait))
    awaited = sorted(first.needs)
    where = " and ".join(dict.fromkeys(str(stuck[rank].wait.place) for rank in together))
    called = wait_text(first.wait, len(states))
    sentence = f"{ranks_do(together, 'wait')} in {called} at {where}"
    if first.wait.call is None:
        sentence += ", and no other rank can unblock it"
    else:
        sentence += f" for {name_ranks(awaited)}"
    chain, seen = list(awaited), {*awaited, *together}
    for rank in chain:  # grows: a rank that is waited for may wait itself
        more = sorted(waits[rank].needs - seen) if rank in waits and not waits[rank].any_of else []
        chain += more
        seen |= set(more)
    others = [elsewhere(states[rank], matching, first.wait, waits, len(states)) for rank in chain[:MOST_NAMED]]
    sentence += f": {'; '.join(dict.fromkeys(others))}"
    sentence += matching.line_divergence(first.wait.call.group) if first.wait.call is not None else ""
    if first.wait.call is not None:
        own = {rank: each.wait.call for rank, each in waits.items() if each.wait.call is not None}
        sentence += called_from(own[rank] for rank in (together[0], awaited[0]) if rank in own)
    divergence = divergence_of(states, matching, waits, together[0], awaited[0])
    sentence += divergence.text
    sentence += circle(first, stuck) or f"; {divergence.remedy or remedy_of(first, waits, states)}"
    return Finding(HANG, sentence, tuple(awaited), table(states, waits), ends=True)


def divergence_of(
    states: Sequence[RankState], matching: Matching, waits: Mapping[int, Blocked], waiting: int, other: int
) -> Divergence:
    """Return the first known reason why two ranks diverged: two threads, a branch, steps and batches."""
    calls = {rank: each.wait.call for rank, each in waits.items() if each.wait.call is not None}
    call = calls.get(waiting)
    if call is None:
        return Divergence()
    found = matching.shared_by_threads(call.group)
    if not found.remedy and states[other].raised is None:
        found = made_by_some(call, calls.get(other))
    return found if found.remedy else explain_divergence(states, waiting, other, calls)


def meeting_key(wait: Wait) -> object:
    """Return a key that is equal for all waits in the same call of a group."""
    if wait.call is None or wait.call.kind.op in ("send", "recv"):
        return wait
    return wait.call.group, wait.call.seq


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
        return f"new_group({list(call.kind.dims[0])}), the {ordinal(call.seq)} group that is made,"
    return f"{call_text(call)} of {group_text(call.group, world_size)}"


def ordinal(index: int) -> str:
    """Return "1st" for 0."""
    number = index + 1
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def elsewhere(state: RankState, matching: Matching, wait: Wait, waits: dict[int, Blocked], world_size: int) -> str:
    who = f"rank {state.rank}"
    last = matching.last_call(wait.call.group, state.rank) if wait.call is not None else state.last
    before = f", its last call there was {call_text(last)} at {last.place}" if last is not None else ""
    if not before and state.last is not None:
        before = f", its last call was {call_text(state.last)} at {state.last.place}"
    if state.raised is not None:
        return f"{who} raised {state.raised.kind} at {state.raised.place or 'its end'}{before}"
    if state.exit_code is None and state.exited is not None:
        return f"{who} {how_it_ended(state.exited)}{before}"
    if state.missing:
        return f"{who} {state.missing}"
    if state.over:
        return f"{who} has ended without it{before}"
    own = waits.get(state.rank)
    if own is not None:
        awaited = "" if own.wait.call is None else f" for {name_ranks(sorted(own.needs))}"
        return f"{who} waits in {wait_text(own.wait, world_size)} at {own.wait.place}{awaited}"
    return f"{who} is at {position_of(state)}{before}"


def circle(first: Blocked, stuck: dict[int, Blocked]) -> str:
    """Return the kind of circle, if it has a name."""
    calls = [each.wait.call for each in stuck.values() if each.wait.call is not None]
    ops = {call.kind.op for call in calls}
    closed = len(calls) > 1 and all(each.needs <= set(stuck) for each in stuck.values())  # no rank in it has ended
    if ops == {"send"} and closed:
        return ". Each sends first, and none receives: let one rank of each pair receive first, or use isend"
    if ops == {"recv"} and closed:
        return ". Each receives first, and none sends: let one rank of each pair send first"
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


def remedy_of(first: Blocked, waits: Mapping[int, Blocked], states: Sequence[RankState]) -> str:
    """Return how to change a wait that is in no named circle."""
    call, other = first.wait.call, states[min(first.needs)]
    if call is None:
        return f"let some rank set the key of {first.wait.what} before it waits"
    if other.raised is not None or (other.exit_code is None and other.exited):
        return f"first fix what ended rank {other.rank}"
    if call.kind.op in ("send", "recv") and not call.place.named_call:
        return "make one recv for each send, in the same order on both ranks"
    own = waits.get(other.rank)
    other_call = own.wait.call if own is not None else None
    if other_call is not None and other_call.place.line and call.place.below and not call.place.named_call:
        call = other_call  # such as a call in a backward pass, whose callers differ
    return all_or_none(call)


def position_of(state: RankState) -> str:
    """Return the script's line in the main thread, with the innermost function below it."""
    return str(main_place(state))


def main_place(state: RankState) -> CallPlace:
    """Return the script's line in the main thread."""
    frames = [frame for frame in state.frames() if OWN not in frame.file]
    user_frame = next((frame for frame in frames if not library(frame)), None)
    if user_frame is None:
        return CallPlace(frames[0].function if frames else "an unknown line")
    line = f"{user_frame.file.rpartition('/')[2]}:{user_frame.line}"
    return CallPlace(line, frames[0].function if frames[0] != user_frame else "", user_frame.file)


def library(frame: Frame) -> bool:
    return any(each in frame.file for each in LIBRARIES)


def table(states: Sequence[RankState], waits: dict[int, Blocked]) -> list[list[str]]:
    rows = []
    for state in states:
        own = waits.get(state.rank)
        if own is not None:
            called = wait_text(own.wait, len(states))
            awaited = f"for {name_ranks(sorted(own.needs))}"
            rows.append([f"rank {state.rank}", str(own.wait.place), called, awaited, source_line(own.wait.place)])
        elif state.over:
            how = how_it_ended(state.exited or 0) if state.exit_code is None else f"ended with code {state.exit_code}"
            how = f"raised {state.raised.kind}" if state.raised is not None else state.missing or how
            last = f"{call_text(state.last)}, its last call" if state.last is not None else "no call"
            place = state.raised.place if state.raised is not None else str(state.last.place) if state.last else ""
            text = source_line(state.last.place) if state.last is not None and state.raised is None else ""
            rows.append([f"rank {state.rank}", place, last, how, text])
        else:
            at, called, share = main_place(state), "no call", f"{state.cpu_share:.0%} of a core"
            if not state.frames() and state.last is not None:
                at, called = state.last.place, f"{call_text(state.last)}, its last call"
            rows.append([f"rank {state.rank}", str(at), called, share, source_line(at)])
    return rows


# Hangs after mismatched calls: all ranks have called, but different calls, and none ends.
#
# gloo ends some such calls with wrong sums, and a rank reports the end of a wait only with its next call. So a rank
# counts as hung only if its main thread is in torch, without CPU time.


def hung_in_mismatch(states: Sequence[RankState], matching: Matching) -> dict[int, Blocked]:
    """Return the ranks that hang because of mismatched calls, with those that wait for them."""
    mismatched = {}
    for state in states:
        wait = state.waiting(matching.is_mismatched)
        if wait is not None and wait.call is not None and state.is_idle and is_in_torch(state):
            others = frozenset(wait.call.group.ranks) - {state.rank}
            mismatched[state.rank] = Blocked(wait, others, any_of=True)  # any of them may still end it
    stuck = hung(waits_of(states, matching) | mismatched, {state.rank for state in states if state.over})
    return stuck if set(stuck) & set(mismatched) else {}


def is_in_torch(state: RankState) -> bool:
    file = state.frames()[0].file if state.frames() else ""
    return OWN in file or ("/torch/" in file and LOADERS not in file)


def mismatch_hang(stuck: Mapping[int, Blocked], world_size: int) -> Finding:
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

LOG_EVERY_S = 10.0
AT_WORK = 0.5  # of a core


class IdleWatch:
    """Checks repeatedly; `idle_limit_s` is how long a rank may be idle while others wait for it."""

    def __init__(self, idle_limit_s: float, log: Callable[[str], None]) -> None:
        self._limit_s, self._log = idle_limit_s, log
        self._logged_at: float | None = None
        self._idle_since: dict[int, float] = {}

    def _all_idle(self, states: Sequence[RankState], now: float) -> Finding | None:
        """Return a finding if no rank is in a call or busy."""
        left = [state for state in states if not state.over]
        if not left or any(not state.is_idle or now - state.received_at < self._limit_s for state in left):
            return None
        ranks = tuple(state.rank for state in left)
        where = f"at {position_of(left[0])} for {self._limit_s:g} s"
        sentence = f"{name_ranks(ranks)} did nothing {where}, and no other rank works"
        return Finding(HANG, sentence, ranks, table(states, {}), ends=True)

    def find_idle(self, states: Sequence[RankState], matching: Matching, now: float) -> Finding | None:
        """Log busy ranks at intervals; return a finding if one was idle for too long."""
        waits = waits_of(states, matching)
        if (all_idle := self._all_idle(states, now)) is not None:
            return all_idle
        needed = {rank for each in waits.values() for rank in each.needs if not each.any_of}
        alone = [state for state in states if state.rank in needed and state.rank not in waits and not state.over]
        idle = {state.rank for state in alone if state.is_idle}
        self._idle_since = {rank: self._idle_since.get(rank, now) for rank in idle}
        if not alone or hung(waits, {state.rank for state in states if state.over}):
            self._logged_at = None
            return None
        if self._logged_at is None:
            self._logged_at = now
        waiting = sorted(rank for rank, each in waits.items() if each.needs & {state.rank for state in alone})
        wait = waits[waiting[0]].wait
        who = f"{ranks_do(waiting, 'wait')} for it in {wait.what} at {wait.place}"
        late = [rank for rank, since in self._idle_since.items() if now - since > self._limit_s]
        if late:
            sentence = f"rank {late[0]} was idle at {position_of(states[late[0]])} for {self._limit_s:g} s, and {who}"
            return Finding(HANG, sentence, tuple(late), table(states, waits), ends=True)
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            for state in alone:
                doing = "computes" if state.cpu_share > AT_WORK else "is idle"
                self._log(
                    f"no hang    rank {state.rank} {doing} at {position_of(state)} ({state.cpu_share:.0%} of a core),"
                    f" and {who} for {now - wait.since_s:.0f} s"
                )
        return None
