"""The verdict on a job's dumps: which rank waits for whom, the known causes, those ruled out, and what is unknown.

Calls are matched, and hung ranks found, by matching.py and deadlock.py, as in a live run. Two things are decided here,
because a dump shows one moment and not a run. A rank in an unknown place may be busy, so ranks that wait for it only
wait and are not hung. And a GPU has calls queued behind one that has not ended: if nothing else explains why a call
made by all does not end, the queued ones count as not made.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from distlab.lab.cluster import name_ranks
from distlab.lab.report.table import printable
from distlab.lab.report.units import counted
from distlab.tools.check.dump.job import DumpedJob, library
from distlab.tools.check.dump.reading import Dump, Stacks, Unreadable, files_in, read, version_fault
from distlab.tools.check.judge import deadlock
from distlab.tools.check.judge.deadlock import Blocked, hung, wait_text, waits_of
from distlab.tools.check.judge.failures import failures, has_failed, is_consequence
from distlab.tools.check.judge.matching import Matching
from distlab.tools.check.judge.rank_state import (
    MATCH,
    Call,
    Finding,
    Frame,
    Raised,
    RankState,
    Wait,
    call_text,
    group_text,
    ranks_by,
    ranks_do,
)  # fmt: skip
from distlab.tools.check.judge.source_lines import source_line

IN_TORCH = "/site-packages/torch/"  # the place of a rank that waits in a call
MOST_GROUPS = 4  # that are listed
TERMINATED = -15  # a launcher's signal to the other ranks


@dataclass
class Verdict:
    """The verdict on the dumps."""

    job: DumpedJob
    matching: Matching
    findings: list[Finding] = field(default_factory=list)
    waiting: str = ""  # ranks that wait, if it is unknown whether that ends
    is_late: bool = False  # they have waited for long
    stalled: bool = False  # in a call that all have made
    rows: list[list[str]] = field(default_factory=list)  # each rank's place
    faults: list[str] = field(default_factory=list)  # of files
    ruled_out: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    what: str = ""  # number of dumps and ranks, and their source

    @property
    def exit_code(self) -> int:
        """Return the code as in a live check; also 1 if ranks wait for an unknown reason."""
        return 1 if self.findings or self.is_late else 0


def judge(places: Iterable[Path], late_after_s: float) -> Verdict:
    """Read and judge; waits of at least `still_s` at the time of the dumps count. Raises Unreadable if no file is a
    dump."""
    job, stacks, texts, faults = DumpedJob(), dict[int, Sequence[Sequence[Frame]]](), dict[int, str](), list[str]()
    versions, summaries, num_duplicates = Counter[str](), "", 0
    for path in files_in(places):
        try:
            found = read(path)
        except Unreadable as error:
            faults.append(f"{printable(path.name)}: {error}")
            continue
        if isinstance(found, Stacks):
            stacks[found.rank] = found.threads
        elif isinstance(found, Dump):
            num_duplicates += found.rank in job.groups_of
            if found.rank not in job.groups_of:
                versions[found.version] += 1
                job.add(found)
        else:
            summaries += found.summary
            texts |= found.by_rank
    if not job.groups_of:
        raise Unreadable(
            f"none of the files is a dump of torch's flight recorder{': ' if faults else ''}{'; '.join(faults)}"
        )
    job.resolve(stacks)
    faults += filter(None, map(version_fault, versions))
    faults += [f"{counted(num_duplicates, 'dumps')} of ranks that have one already"] if num_duplicates else []
    faults += [f"{counted(job.malformed, 'entries')} in an unknown format"] if job.malformed else []
    set_ends(job.states, texts, summaries)
    verdict = apply_rules(job, late_after_s)
    if verdict.stalled and (behind := queued(job)):
        job.calls = [call for call in job.calls if id(call) not in behind]
        verdict = apply_rules(job, late_after_s)
    verdict.faults = faults
    verdict.what = description(job, versions)
    verdict.ruled_out, verdict.unknown = list(ruled_out(verdict, texts)), list(unknown(job))
    return verdict


def apply_rules(job: DumpedJob, late_after_s: float) -> Verdict:
    """Apply check's rules to all calls."""
    states, size = job.states, len(job.states)
    matching = Matching(size)
    for call in sorted(job.calls, key=attrgetter("began_s")):
        matching.add(call)
    for state in states:
        set_wait(job, state, matching)
    verdict = Verdict(job, matching)
    waits, over = waits_of(states, matching), {state.rank for state in states if state.over}
    stuck = hung(waits, over)
    failed = {state.rank for state in states if has_failed(state)}
    if failed:
        verdict.findings += failures(states, matching, {}, explained=False)
    found = []
    if stuck and not any(each.needs & failed for each in stuck.values()):
        found = [deadlock.diagnosis(states, matching, waits, stuck)]
    elif not failed and (stuck := deadlock.hung_in_mismatch(states, matching)):
        found = [deadlock.mismatch_hang(stuck, size)]
    verdict.findings += [replace(each, sentence=each.sentence + fewer_calls(job, stuck)) for each in found]
    verdict.findings += [*matching.mismatches(states), *inconsistent_groups(job)]
    if verdict.findings:
        return verdict
    stalled = [call for state in states if not state.over for call in list(state.open.values())[:1]]
    if waits:
        verdict.waiting, wait = waiting_text(job, matching, waits), waits[min(waits)].wait
    elif stalled:
        verdict.waiting, wait, verdict.stalled = stalled_text(job, stalled), wait_in(stalled[0]), True
    verdict.is_late = bool(verdict.waiting) and job.waited_s(wait) >= late_after_s
    verdict.rows = deadlock.table(states, waits)
    return verdict


def inconsistent_groups(job: DumpedJob) -> Iterator[Finding]:
    """Yield a finding if a name belongs to different groups on different ranks: torch numbers groups by creation."""
    for name in sorted({name for groups in job.groups_of.values() for name in groups}):
        sides = ranks_by({rank: groups[name][1] for rank, groups in job.groups_of.items() if name in groups})
        if len(sides) > 1:
            text = " and ".join(
                f"{name_ranks(ranks)} on {name_ranks(on_ranks)}{first_use(job, name, on_ranks)}"
                for ranks, on_ranks in sides.items()
            )
            sentence = (
                f"group {name} has {text}: not all ranks called new_group, or they called it in different orders; call"
                " each new_group on all ranks, also on those outside of the group"
            )
            yield Finding(MATCH, sentence, tuple(sorted(job.groups_of)), ends=True)


def first_use(job: DumpedJob, name: str, on_ranks: Collection[int]) -> str:
    """Return the first call of these ranks in the group of this name, if one has a line."""
    calls = (call for call in job.calls if call.group.name == name and call.rank in on_ranks and call.place.line)
    first = min(calls, key=attrgetter("began_s"), default=None)
    return f" (used in {first.kind.op} at {first.place})" if first is not None else ""


def wait_in(call: Call) -> Wait:
    return Wait(call, call_text(call), call.place, call.began_s)


def stalled_text(job: DumpedJob, stalled: Sequence[Call]) -> str:
    """Return a remark on a call that does not end although all have made it, as far as known."""
    call = stalled[0]
    ranks = [each.rank for each in stalled if (each.group, each.seq) == (call.group, call.seq)]
    why = (
        "no dump lists the ranks of that group, so it is unknown which are missing"
        if call.group.name in job.groups_without_ranks
        else "all its ranks have made it, with equal tensors as far as the recorder shows, so the order of the calls is"
        " not the cause: look at the network, the GPUs and the library's own log (NCCL_DEBUG=INFO)"
    )
    return (
        f"{ranks_do(ranks, 'wait')} in {call_text(call)} of {group_text(call.group, len(job.states))} at"
        f" {call.place}, which has not ended after {job.waited_s(wait_in(call)):.3g} s: {why}"
    )


def set_wait(job: DumpedJob, state: RankState, matching: Matching) -> None:
    """Set the rank's wait: from its stack, else its first open call that another rank has not made, else its first
    mismatched one."""
    state.waits.clear()
    if state.over:
        return
    position = job.positions.get(state.rank)
    open_calls = sorted(state.open.values(), key=lambda call: position is None or call.place.line != position.line)
    open_calls = [*filter(None, [job.by_stack.get(state.rank)]), *open_calls]
    waited = next((call for call in open_calls if matching.absent(call)), None)
    waited = waited or next((call for call in state.open.values() if matching.is_mismatched(call)), None)
    if waited is None:
        return
    if not waited.place.line and not waited.place.in_thread and position is not None:
        waited.place = position
    state.waits[0] = wait_in(waited)
    state.stacks = {0: [Frame(IN_TORCH, 0, waited.kind.op), *state.frames()]}


def waiting_text(job: DumpedJob, matching: Matching, waits: Mapping[int, Blocked]) -> str:
    """Return the ranks that wait for a rank which may still come."""
    first, size = waits[min(waits)], len(job.states)
    other = next((rank for rank in sorted(first.needs) if rank not in waits), min(first.needs))
    where = deadlock.elsewhere(job.states[other], matching, first.wait, dict(waits), size)
    where = where.replace("is at an unknown line", "waits in no call that is recorded")
    code = source_line(deadlock.main_place(job.states[other])) if other in job.positions else ""
    where += f" (its line is `{code}`)" if code else ""
    hint = f"; its stack does: py-spy dump --pid PID > rank{other}.txt, next to the dumps"
    together = [rank for rank, each in waits.items() if each.needs == first.needs]
    return (
        f"{ranks_do(together, 'wait')} in {wait_text(first.wait, size)} at {first.wait.place} for"
        f" {name_ranks(first.needs)}, for {job.waited_s(first.wait):.3g} s when the dumps were written: {where}."
        " A dump does not show whether it computes, sleeps or waits for a queue, a lock or a file"
        + ("" if other in job.positions else hint)
    )


def fewer_calls(job: DumpedJob, stuck: Mapping[int, Blocked]) -> str:
    """Return the remark that a diverged rank has made the awaited line's call less often: it left a loop."""
    first = stuck[min(stuck)]
    call = first.wait.call
    if call is None or not call.place.line or job.truncated:
        return ""
    op, line = call.kind.op, call.place.line
    made = Counter(each.rank for each in job.calls if each.place.line == line and each.group == call.group)
    fewer = next((rank for rank in sorted(first.needs) if 0 < made[rank] < made[call.rank]), None)
    if fewer is None:
        return ""
    return (
        f"; rank {call.rank} has made the {op} at {line} {counted(made[call.rank], 'times')}, and rank {fewer}"
        f" {counted(made[fewer], 'times')}: in a loop this means uneven data, or a stop decided on one rank"
    )


def queued(job: DumpedJob) -> set[int]:
    """Return the ids of calls queued behind each rank's first one that cannot end, as in a GPU's stream; empty if all
    end that way."""
    if "gloo" in job.backends:
        return set()
    queues = {state.rank: list(state.open.values()) for state in job.states if state.open}
    ended = True
    while ended:
        ended = False
        heads = {rank: (queue[0].group, queue[0].seq) for rank, queue in queues.items() if queue}
        for head in set(heads.values()):
            if all(heads.get(rank) == head for rank in head[0].ranks):
                ended = True
                for rank in head[0].ranks:
                    del queues[rank][0]
    return {id(call) for queue in queues.values() for call in queue[1:]}


# Ends of ranks, from their logs.

SUMMARY = re.compile(r"rank\s*:\s*(\d+)\s.*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?P<frames>(?:[ \t].*\n|\n)+)(?P<kind>[\w.]+)(?:: (?P<text>.*))?$",
    re.MULTILINE,
)
AT = re.compile(r'File "([^"]*)", line (\d+)')


def set_ends(states: Sequence[RankState], texts: Mapping[int, str], summaries: str) -> None:
    """Set the ends of ranks outside calls: an exception that is not about another's end, or an exit code."""
    for state in states:
        if state.open or not (tracebacks := list(TRACEBACK.finditer(texts.get(state.rank, "")))):
            continue
        last = tracebacks[-1]
        if not state.missing and texts[state.rank][last.end() :].strip():
            continue  # it continued
        own = [(file, line) for file, line in AT.findall(last["frames"]) if not library(file)]
        place = f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
        raised = Raised(last["kind"].rpartition(".")[2], last["text"] or "", last[0], place, 0.0)
        state.raised = None if is_consequence(raised) else raised
    for rank, code in ((int(rank), int(code)) for rank, code in SUMMARY.findall(summaries)):
        if rank < len(states) and states[rank].raised is None and not states[rank].open and code != TERMINATED:
            states[rank].missing = "" if code < 0 else f"ended with exit code {code}"
            states[rank].exited = code if code < 0 else None


# The rest of the report.


def description(job: DumpedJob, versions: Counter[str]) -> str:
    """Return the number of dumps and ranks, their writers and groups."""
    groups = sorted(dict.fromkeys(call.group for call in job.calls if call.group.instance >= 0))
    size = len(job.states)
    names = [group_text(group, size) for group in groups[:MOST_GROUPS]]
    more = f" and {len(groups) - MOST_GROUPS} more" if len(groups) > MOST_GROUPS else ""
    calls = sum(state.num_calls for state in job.states)
    return (
        f"dumps of {len(job.groups_of)} of {counted(size, 'ranks')} · version {', '.join(versions)}"
        f" · {counted(calls, 'calls')} by {', '.join(sorted(job.backends)) or 'no backend'} in"
        f" {counted(len(groups), 'groups')}: {', '.join(names) or 'none'}{more}"
    )


def ruled_out(verdict: Verdict, texts: Mapping[int, str]) -> Iterator[str]:
    """Yield causes that the files exclude."""
    job = verdict.job
    if not any(finding.check == MATCH for finding in verdict.findings):
        yield f"different operations, shapes or dtypes ({counted(len(job.calls), 'calls')} were compared)"
    if len(job.groups_of) == len(job.states) and not any(map(has_failed, job.states)):
        yield "a rank that had ended before (each left a dump)"
    if set(texts) >= set(job.groups_of) and not any(state.raised for state in job.states):
        yield "an exception (none is in the ranks' logs)"


def unknown(job: DumpedJob) -> Iterator[str]:
    """Yield what no file shows."""
    yield "reduce operations and roots, which the recorder does not store"
    if "gloo" in job.backends and not job.by_stack:
        yield "sends, receives and new groups on gloo, which only stacks show"
    if not job.has_lines:
        yield "lines of the script: dumps as JSON have none"
    if job.truncated:
        yield f"the first calls of {name_ranks(job.truncated)}: the recorder kept the last ones (TORCH_FR_BUFFER_SIZE)"
    if job.groups_without_ranks:
        yield f"the ranks of group {', '.join(sorted(job.groups_without_ranks))}, assumed to be those that called in it"
    if without_dump := set(range(len(job.states))) - set(job.groups_of):
        yield f"everything about {name_ranks(without_dump)}, without a dump"
