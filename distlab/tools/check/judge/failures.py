"""Failures of the script: the first one, with its consequences on other ranks in the same sentence.

If a rank fails, its neighbours raise "Connection closed by peer": as many tracebacks as ranks, only one of them about
the cause. An exception about a connection or a timeout counts as a consequence if another rank has failed, ended or
been killed; otherwise it is reported with the call that raised it.
"""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distlab.lab.cluster import name_ranks
from distlab.lab.cluster.departure import BLAMELESS
from distlab.lab.report.units import counted
from distlab.tools.check.judge.deadlock import MOST_NAMED, Standing, diagnosis, standing_at, standings, table, unsettled
from distlab.tools.check.judge.exceptions import describe_exception, folded, how_it_ended
from distlab.tools.check.judge.framework_words import ALONE, words_of_cause
from distlab.tools.check.judge.matching import Matching
from distlab.tools.check.judge.rank_state import END, Finding, Raised, RankState, Wait, call_text, ranks_by, ranks_do
from distlab.tools.check.watch.spawned_ranks import INSTEAD

ABORTS = tuple(-number for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGBUS))
# Messages that no connection raises.
OWN_KINDS = ("SystemExit", "Exited", "ValueError", "TypeError", "AssertionError", "KeyError")


def failures(
    cases: Sequence[RankState], matching: Matching, lost: Mapping[int, str], at_limit: Finding | None = None, *,
    explained: bool,
) -> Iterator[Finding]:  # fmt: skip
    """Yield how the scripts failed, unless `lost` ranks explain it; `explained` is whether something else may,
    `at_limit` the last result of `limit_passed`."""
    waits = standings(cases, matching)
    late = still_at([case for case in unsettled(cases, matching) if case.rank not in waits])
    left = [case for case in cases if case.exit_code is None and case.gone is not None and case.rank not in lost]
    for case in left:
        fine = not case.left_early and all(case.rank not in each.needs for each in waits.values())
        if not fine and not (aborted(case) and explained):
            what = f"rank {case.rank} {how_it_ended(case.gone or 0)}{last_call(case)}"
            sentence = f"{what}{consequences(cases, waits, [case.rank])}{late}"
            yield Finding(END, sentence, (case.rank,), table(cases, waits))
    raised = {case.rank: case.raised for case in cases if case.raised is not None}
    own = {rank: each for rank, each in raised.items() if not blameless(each)}
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(own, key=lambda rank: own[rank].at_s):
        alike.setdefault((own[rank].kind, folded(own[rank].text, rank)), []).append(rank)
    for of_fault in alike.values():
        ranks = sorted(of_fault)
        first = own[of_fault[0]]
        what = " and ".join(dict.fromkeys(own[rank].place for rank in ranks if own[rank].place))
        how = f"{describe_exception(first, what)}{consequences(cases, waits, ranks)}{late}"
        sentence = f"{name_ranks(ranks)} {how}"
        yield Finding(END, sentence, tuple(ranks), table(cases, waits), traceback=first.traceback)
    if raised and not own and not explained and not left:
        yield blamed(cases, matching, at_limit)


def blamed(cases: Sequence[RankState], matching: Matching, at_limit: Finding | None) -> Finding:
    """Return a finding for scripts that failed only by lost connections or timeouts: their calls, and the missing
    ranks."""
    failed = {case.rank: case.raised for case in cases if case.raised is not None}
    first = min(failed, key=lambda rank: failed[rank].at_s)
    waits = failed_in(cases, matching)
    how = f"rank {first} {describe_exception(failed[first], failed[first].place)}"
    stuck = {rank: each for rank, each in waits.items() if not each.any_of}
    if (late := limit_passed(cases, matching)) is not None:
        return late
    if not stuck and at_limit is not None:
        return at_limit  # the late rank has come to the call meanwhile
    if not stuck:
        return Finding(END, how, (first,), table(cases, waits), traceback=failed[first].traceback)
    found = diagnosis(cases, matching, waits, stuck)
    return replace(found, sentence=f"{found.sentence} ({how})")


def failed_in(cases: Sequence[RankState], matching: Matching) -> dict[int, Standing]:
    """Return the waits of ranks that wait, and of those that raised in a call that not all ranks had reached."""
    waits = standings(cases, matching)
    for case in cases:
        call = next(iter(case.open.values()), case.last)
        if case.raised is not None and call is not None and (needs := matching.absent(call)):
            wait = Wait(call, call_text(call), call.place, call.began_s)
            waits[case.rank] = Standing(wait, frozenset(needs), any_of=False)
    return waits


def limit_passed(cases: Sequence[RankState], matching: Matching) -> Finding | None:
    """Return a finding for ranks whose timeout passed while they waited for a busy rank; None if a rank failed by
    itself."""
    if any(has_failed(case) and (case.raised is None or not blameless(case.raised)) for case in cases):
        return None
    failed = {case.rank: case.raised for case in cases if case.raised is not None}
    waits = failed_in(cases, matching)
    for rank, raised in failed.items():
        own = waits.get(rank)
        working = [cases[each] for each in sorted(own.needs)] if own is not None and not own.any_of else []
        working = [case for case in working if not case.over and case.rank not in waits]
        limit = re.search(r"[Tt]imed out (?:after )?waiting (?:for )?(\d+) ?ms|[Tt]imed? ?out", raised.text)
        if own is None or limit is None or not working:
            continue
        within = f" of {int(limit[1]) / 1000:g} s" if limit[1] else ""
        who = "; ".join(
            f"rank {case.rank} was still at {standing_at(case)} ({case.cpu_share:.0%} of a core)" for case in working
        )
        sentence = (
            f"the limit{within} of the script's process group passed while a rank was at work: rank {rank} waited in"
            f" {own.wait.what} at {own.wait.place} for {name_ranks(case.rank for case in working)}, and {who}; give"
            " init_process_group a longer timeout, or let the others do their part of that work"
        )
        return Finding(END, sentence, tuple(case.rank for case in working), table(cases, waits))
    return None


def consequences(cases: Sequence[RankState], waits: Mapping[int, Standing], ranks: Sequence[int]) -> str:
    """Return which ranks wait for one of these, and which failed because of them."""
    waiting = [rank for rank, each in waits.items() if not each.needs.isdisjoint(ranks) and not each.any_of]
    failed = [case for case in cases if case.raised is not None and case.rank not in ranks and blameless(case.raised)]
    parts = []
    if waiting:
        wait, whom = waits[waiting[0]].wait, "it" if len(ranks) == 1 else "them"
        parts.append(f"; {ranks_do(waiting, 'wait')} for {whom} in {wait.what} at {wait.place}")
    if failed:
        last, whom = failed[0].last, "it" if len(ranks) == 1 else "them"
        where = f" in {call_text(last)} at {last.place}" if last is not None else ""
        parts.append(f"; {name_ranks(case.rank for case in failed)} failed because of {whom}{where}")
    return "".join(parts)


def still_at(late: Sequence[RankState]) -> str:
    """Return where the other ranks were that had not ended at the time of the report, and wait for nobody."""
    at = {case.rank: f" at {standing_at(case)}" if case.frames() else last_call(case) for case in late}
    does = {case.rank: "still stand" if case.is_idle else "still compute" for case in late}
    by_place = ranks_by({rank: (does[rank], at[rank]) for rank in at})
    told = [f"; {ranks_do(ranks, verb)}{where}" for (verb, where), ranks in by_place.items()]
    return "".join(told[:MOST_NAMED])


def last_call(case: RankState) -> str:
    """Return the last known call of a rank, to append to its end."""
    if case.last is None:
        return " before its first call"
    return f", its last call was {call_text(case.last)} at {case.last.place}"


def has_failed(case: RankState) -> bool:
    """Return whether the script has raised, or its process has gone before the script ended."""
    return case.raised is not None or case.left_early


def aborted(case: RankState) -> bool:
    """Return whether a library aborted the process, as gloo does if tensors do not fit."""
    return case.gone in ABORTS


def blameless(raised: Raised) -> bool:
    """Return whether an exception may be caused by another rank's end."""
    return raised.kind not in OWN_KINDS and any(word in raised.text.lower() for word in BLAMELESS)


# Scripts whose ranks do not communicate: nothing was checked, so they do not pass.


def nothing_distributed(cases: Sequence[RankState]) -> Iterator[Finding]:
    """Yield a finding for scripts that ended well without a group or calls, or trained on each rank alone, with the
    reason."""
    words, called = words_of_cause(cases[0].course.package, ALONE), any(case.num_calls for case in cases)
    if len(cases) == 1:
        return
    if not called and not any(case.grouped for case in cases):
        sentence = f"no process group was made, and no rank called another: {why_no_group(cases, words)}"
    elif all(case.trained > case.exchanged for case in cases) and (words or not called):
        what = words or "wrap the model in DistributedDataParallel, or average the gradients before each step"
        sentence = (
            f"each of the {len(cases)} ranks trains alone: in its {counted(cases[0].steps, 'steps')} neither gradients"
            f" nor weights went to another rank; {what}"
        )
    else:
        return
    yield Finding(END, sentence, tuple(range(len(cases))))


def why_no_group(cases: Sequence[RankState], words: str) -> str:
    """Return the reason and the remedy; `words` are the framework's."""
    starts = next((case.starts for case in cases if case.starts is not None), None)
    if starts is not None:
        return (
            f"the script starts processes of its own at {starts.line or starts}, which check does not see into;"
            f" {INSTEAD}"
        )
    if (counts := next((case.counts for case in cases if case.counts is not None), None)) is not None:
        return (
            f"the script asks at {counts.line or counts} how many GPUs there are, and ends; check shows it one a rank,"
            f" {len(cases)} here: run it with WORLD_SIZE as large as the number that it wants"
        )
    what = words or (
        "call torch.distributed.init_process_group() where RANK and WORLD_SIZE are in the environment, as torchrun and"
        " check set them"
    )
    return f"each of the {len(cases)} ranks ran the whole script alone; {what}"
