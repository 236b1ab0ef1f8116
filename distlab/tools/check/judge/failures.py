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
from distlab.tools.check.judge.deadlock import MOST_NAMED, Blocked, diagnosis, position_of, table, unsettled, waits_of
from distlab.tools.check.judge.exceptions import describe_exception, failure_key, how_it_ended
from distlab.tools.check.judge.framework_remedies import ALONE, cause_remedy
from distlab.tools.check.judge.matching import Matching
from distlab.tools.check.judge.rank_state import END, Finding, Raised, RankState, Wait, call_text, ranks_by, ranks_do
from distlab.tools.check.watch.spawned_ranks import INSTEAD

ABORTS = tuple(-number for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGBUS))
# Messages that no connection raises.
OWN_KINDS = ("SystemExit", "Exited", "ValueError", "TypeError", "AssertionError", "KeyError")


def failures(
    states: Sequence[RankState], matching: Matching, lost: Mapping[int, str], timeout_finding: Finding | None = None, *,
    explained: bool,
) -> Iterator[Finding]:  # fmt: skip
    """Yield how the scripts failed, unless `lost` ranks explain it; `explained` is whether something else may,
    `timeout_finding` the last result of `timeout_passed`."""
    waits = waits_of(states, matching)
    late = late_positions([state for state in unsettled(states, matching) if state.rank not in waits])
    early = [each for each in states if each.exit_code is None and each.exited is not None and each.rank not in lost]
    for state in early:
        fine = not state.left_early and all(state.rank not in each.needs for each in waits.values())
        if not fine and not (aborted(state) and explained):
            what = f"rank {state.rank} {how_it_ended(state.exited or 0)}{last_call(state)}"
            sentence = f"{what}{consequences(states, waits, [state.rank])}{late}"
            yield Finding(END, sentence, (state.rank,), table(states, waits))
    raised = {state.rank: state.raised for state in states if state.raised is not None}
    own = {rank: each for rank, each in raised.items() if not is_consequence(each)}
    similar: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(own, key=lambda rank: own[rank].at_s):
        similar.setdefault((own[rank].kind, failure_key(own[rank].text, rank)), []).append(rank)
    for failed_alike in similar.values():
        ranks = sorted(failed_alike)
        first = own[failed_alike[0]]
        what = " and ".join(dict.fromkeys(own[rank].place for rank in ranks if own[rank].place))
        how = f"{describe_exception(first, what)}{consequences(states, waits, ranks)}{late}"
        sentence = f"{name_ranks(ranks)} {how}"
        yield Finding(END, sentence, tuple(ranks), table(states, waits), traceback=first.traceback)
    if raised and not own and not explained and not early:
        yield connection_failure(states, matching, timeout_finding)


def connection_failure(states: Sequence[RankState], matching: Matching, timeout_finding: Finding | None) -> Finding:
    """Return a finding for scripts that failed only by lost connections or timeouts: their calls, and the missing
    ranks."""
    failed = {state.rank: state.raised for state in states if state.raised is not None}
    first = min(failed, key=lambda rank: failed[rank].at_s)
    waits = failed_in(states, matching)
    how = f"rank {first} {describe_exception(failed[first], failed[first].place)}"
    stuck = {rank: each for rank, each in waits.items() if not each.any_of}
    if (late := timeout_passed(states, matching)) is not None:
        return late
    if not stuck and timeout_finding is not None:
        return timeout_finding  # the late rank has come to the call meanwhile
    if not stuck:
        return Finding(END, how, (first,), table(states, waits), traceback=failed[first].traceback)
    found = diagnosis(states, matching, waits, stuck)
    return replace(found, sentence=f"{found.sentence} ({how})")


def failed_in(states: Sequence[RankState], matching: Matching) -> dict[int, Blocked]:
    """Return the waits of ranks that wait, and of those that raised in a call that not all ranks had reached."""
    waits = waits_of(states, matching)
    for state in states:
        call = next(iter(state.open.values()), state.last)
        if state.raised is not None and call is not None and (needs := matching.absent(call)):
            wait = Wait(call, call_text(call), call.place, call.began_s)
            waits[state.rank] = Blocked(wait, frozenset(needs), any_of=False)
    return waits


def timeout_passed(states: Sequence[RankState], matching: Matching) -> Finding | None:
    """Return a finding for ranks whose timeout passed while they waited for a busy rank; None if a rank failed by
    itself."""
    if any(has_failed(state) and (state.raised is None or not is_consequence(state.raised)) for state in states):
        return None
    failed = {state.rank: state.raised for state in states if state.raised is not None}
    waits = failed_in(states, matching)
    for rank, raised in failed.items():
        own = waits.get(rank)
        working = [states[each] for each in sorted(own.needs)] if own is not None and not own.any_of else []
        working = [state for state in working if not state.over and state.rank not in waits]
        limit = re.search(r"[Tt]imed out (?:after )?waiting (?:for )?(\d+) ?ms|[Tt]imed? ?out", raised.text)
        if own is None or limit is None or not working:
            continue
        within = f" of {int(limit[1]) / 1000:g} s" if limit[1] else ""
        who = "; ".join(
            f"rank {each.rank} was still at {position_of(each)} ({each.cpu_share:.0%} of a core)" for each in working
        )
        sentence = (
            f"the timeout{within} of the script's process group passed while a rank still worked: rank {rank} waited in"
            f" {own.wait.what} at {own.wait.place} for {name_ranks(state.rank for state in working)}, and {who}; pass"
            " a longer timeout to init_process_group, or share that work among the ranks"
        )
        return Finding(END, sentence, tuple(state.rank for state in working), table(states, waits))
    return None


def consequences(states: Sequence[RankState], waits: Mapping[int, Blocked], ranks: Sequence[int]) -> str:
    """Return which ranks wait for one of these, and which failed because of them."""
    waiting = [rank for rank, each in waits.items() if not each.needs.isdisjoint(ranks) and not each.any_of]
    failed = [each for each in states if each.raised and each.rank not in ranks and is_consequence(each.raised)]
    parts = []
    if waiting:
        wait, whom = waits[waiting[0]].wait, "it" if len(ranks) == 1 else "them"
        parts.append(f"; {ranks_do(waiting, 'wait')} for {whom} in {wait.what} at {wait.place}")
    if failed:
        last, whom = failed[0].last, "it" if len(ranks) == 1 else "them"
        where = f" in {call_text(last)} at {last.place}" if last is not None else ""
        parts.append(f"; {name_ranks(state.rank for state in failed)} failed because of {whom}{where}")
    return "".join(parts)


def late_positions(late: Sequence[RankState]) -> str:
    """Return where the other ranks were that had not ended at the time of the report, and wait for nobody."""
    at = {state.rank: f" at {position_of(state)}" if state.frames() else last_call(state) for state in late}
    does = {state.rank: "still idle" if state.is_idle else "still compute" for state in late}
    by_place = ranks_by({rank: (does[rank], at[rank]) for rank in at})
    texts = [f"; {ranks_do(ranks, verb)}{where}" for (verb, where), ranks in by_place.items()]
    return "".join(texts[:MOST_NAMED])


def last_call(state: RankState) -> str:
    """Return the last known call of a rank, to append to its end."""
    if state.last is None:
        return " before its first call"
    return f", its last call was {call_text(state.last)} at {state.last.place}"


def has_failed(state: RankState) -> bool:
    """Return whether the script has raised, or its process exited before the script ended."""
    return state.raised is not None or state.left_early


def aborted(state: RankState) -> bool:
    """Return whether a library aborted the process, as gloo does if tensors do not fit."""
    return state.exited in ABORTS


def is_consequence(raised: Raised) -> bool:
    """Return whether an exception may be caused by another rank's end."""
    return raised.kind not in OWN_KINDS and any(word in raised.text.lower() for word in BLAMELESS)


# Scripts whose ranks do not communicate: nothing was checked, so they do not pass.


def nothing_distributed(states: Sequence[RankState]) -> Iterator[Finding]:
    """Yield a finding for scripts that ended well without a group or calls, or trained on each rank alone, with the
    reason."""
    words, called = cause_remedy(states[0].history.package, ALONE), any(state.num_calls for state in states)
    if len(states) == 1:
        return
    if not called and not any(state.has_default_group for state in states):
        sentence = f"no process group was created, and the ranks did not communicate: {why_no_group(states, words)}"
    elif all(state.trained_elements > state.exchanged_elements for state in states) and (words or not called):
        what = words or "wrap the model in DistributedDataParallel, or average the gradients before each step"
        sentence = (
            f"each of the {len(states)} ranks trains alone: in its {counted(states[0].steps, 'steps')} it sent neither"
            f" gradients nor weights to another rank; {what}"
        )
    else:
        return
    yield Finding(END, sentence, tuple(range(len(states))))


def why_no_group(states: Sequence[RankState], words: str) -> str:
    """Return the reason and the remedy; `words` are the framework's."""
    starts = next((state.starts_processes_at for state in states if state.starts_processes_at is not None), None)
    if starts is not None:
        return (
            f"the script starts processes of its own at {starts.line or starts}, which check cannot observe; {INSTEAD}"
        )
    if (counts := next((each.counts_gpus_at for each in states if each.counts_gpus_at is not None), None)) is not None:
        return (
            f"the script asks at {counts.line or counts} how many GPUs there are, and ends; under check there is one"
            f" per rank, {len(states)} here: set WORLD_SIZE to the number that the script needs"
        )
    what = words or (
        "call torch.distributed.init_process_group() if RANK and WORLD_SIZE are in the environment: torchrun and check"
        " set them"
    )
    return f"each of the {len(states)} ranks ran the whole script by itself; {what}"
