"""Write a script for a few gloo ranks that makes a dump's calls and hangs in the same way: `distlab check repro.py`.

One of the ranks in the same call at the same line is enough, so a job of hundreds is reduced to at most four; groups
and messages between these are kept. Calls before the last few of a group are replaced by sums of one element, so that
the others keep their numbers. Each call is compiled with the file and line of the dump, so that reports name the same
places.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from distlab.tools.check.dump.verdict import Verdict
from distlab.tools.check.judge.deadlock import meeting_key, waits_of
from distlab.tools.check.judge.rank_state import Call, GroupKey

MOST_RANKS = 4
LAST = 3  # calls of a group that are made unchanged
MOST_DIGITS = 7  # of a line number
MESSAGES = ("send", "recv")
MARK = "# Written by distlab check --dump"
# By operation, with the names defined in the script.
STATEMENTS = {
    "all_reduce": "dist.all_reduce(T[0], group=G)",
    "broadcast": "dist.broadcast(T[0], R[0], group=G)",
    "reduce": "dist.reduce(T[0], R[0], group=G)",
    "all_gather": "dist.all_gather([torch.empty_like(T[0]) for _ in R], T[0], group=G)",
    "gather": "dist.gather(T[0], [torch.empty_like(T[0]) for _ in R] if rank == R[0] else None, R[0], group=G)",
    "scatter": "dist.scatter(T[0], [T[0]] * len(R) if rank == R[0] else None, R[0], group=G)",
    "reduce_scatter": "dist.reduce_scatter(torch.empty_like(T[0]), [T[0]] * len(R), group=G)",
    "all_to_all": "dist.all_to_all([torch.empty_like(T[0]) for _ in R], [T[0]] * len(R), group=G)",
    "barrier": "dist.barrier(group=G)",
    "monitored_barrier": "dist.monitored_barrier()",
    "send": "dist.send(T[0], P, group=G)",
    "recv": "dist.recv(T[0], P, group=G)",
    "new_group": "dist.new_group(R)",
}
HEAD = """{mark}: {num_ranks} ranks make the calls of {who}.
#
#     WORLD_SIZE={num_ranks} distlab check {name}

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [{groups}]
# Each rank's calls: file, line, statement, shapes, dtype, group (None for all ranks), peer, ranks.
CALLS = {{
{calls}
}}

for file, line, statement, shapes, dtype, number, P, R in CALLS.get(rank, ()):
    G = None if number is None else groups[number]
    T = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in shapes] or [torch.zeros(1)]
    exec(compile("\\n" * (line - 1) + statement, file, "exec"))
"""


def relevant_ranks(verdict: Verdict) -> list[int]:
    """Return the relevant ranks: all of a small job, else one per awaited call and each rank at fault."""
    states = verdict.job.states
    if len(states) <= MOST_RANKS:
        return list(range(len(states)))
    waits = waits_of(states, verdict.matching)
    seen: dict[str, int] = {}
    for rank in sorted({*waits, *(rank for finding in verdict.findings for rank in finding.ranks)}):
        wait = states[rank].waits.get(0)
        where = (meeting_key(wait), wait.place) if wait is not None else (states[rank].missing, states[rank].last)
        seen.setdefault(str(where), rank)
    return sorted(list(seen.values())[:MOST_RANKS])


def script_of(verdict: Verdict, name: str) -> str:
    """Return the text of the script; empty if nothing hangs."""
    if not verdict.findings:
        return ""
    new_ranks = {rank: index for index, rank in enumerate(relevant_ranks(verdict))}
    calls = [call for call in verdict.job.calls if call.rank in new_ranks and call.kind.peer in (-1, *new_ranks)]
    calls = sorted((call for call in calls if len(inside(call.group, new_ranks)) > 1), key=attrgetter("began_s"))
    counted = [call for call in calls if call.kind.op not in MESSAGES and call.group.instance >= 0]
    groups = sorted({call.group for call in counted}, key=lambda group: (len(group.name), group.name))
    begins = {group: begin_of(group, [call for call in counted if call.group == group], new_ranks) for group in groups}
    created = [group for group in groups if group.name]
    lines = []
    for rank, index in new_ranks.items():
        rows: list[tuple[object, ...]] = [
            ("<earlier>", 1, f"for _ in range({begins[group]}): {STATEMENTS['all_reduce']}", [(1,)], "float32",
             created.index(group) if group in created else None, 0, inside(group, new_ranks))
            for group in groups if rank in group.ranks and begins[group]
        ]  # fmt: skip
        mine = [call for call in calls if call.rank == rank]
        mine = [call for call in mine if call.kind.op in MESSAGES or call.seq >= begins.get(call.group, -1)]
        rows += [row_of(call, created, new_ranks) for call in mine]
        lines.append("".join([f"    {index}: [\n", *(f"        {row},\n" for row in rows), "    ],"]))
    return HEAD.format(
        mark=MARK, num_ranks=len(new_ranks), who=f"ranks {', '.join(map(str, new_ranks))} of {len(verdict.job.states)}",
        groups=", ".join(f"dist.new_group({inside(group, new_ranks)})" for group in created), calls="\n".join(lines),
        name=name,
    )  # fmt: skip


def inside(group: GroupKey, new_ranks: Mapping[int, int]) -> list[int]:
    """Return the ranks of a group in the script's numbering."""
    return [new_ranks[rank] for rank in group.ranks if rank in new_ranks]


def begin_of(group: GroupKey, calls: Sequence[Call], new_ranks: Mapping[int, int]) -> int:
    """Return the first call of the group that is made unchanged: calls before a rank's dump are unknown."""
    last = {call.rank: call.seq for call in calls}
    complete = all(rank in last for rank in group.ranks if rank in new_ranks)
    return max(0, min(last.values()) - (LAST if complete else 0))


def row_of(call: Call, created: Sequence[GroupKey], new_ranks: Mapping[int, int]) -> tuple[object, ...]:
    """Return the call as a row of the script."""
    file, _, line = call.place.line.rpartition(":")
    at = (file, int(line)) if file and line.isdecimal() and len(line) < MOST_DIGITS else ("<unknown>", 1)
    members = inside(call.group, new_ranks)
    peer = new_ranks.get(call.kind.peer, next(each for each in members if each != new_ranks[call.rank]))
    which = created.index(call.group) if call.group in created else None
    statement = STATEMENTS.get(call.kind.op, STATEMENTS["barrier"])
    return *at, statement, [*call.kind.dims[:1]], (*call.kind.dtypes, "float32")[0], which, peer, members
