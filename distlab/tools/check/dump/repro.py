"""A script of a few gloo ranks that makes the calls of a dump and hangs alike: `distlab check repro.py`.

Of ranks that stand in the same call at the same line one is enough, so a job of hundreds folds to at most four; groups
and messages are kept among these. Calls before the last few of a group are made as one-element sums, so that the others
have their numbers. Each call is compiled under the file and line that the dump has, so that it is told alike.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from distlab.tools.check.dump.verdict import Verdict
from distlab.tools.check.judge.deadlock import met_in, standings
from distlab.tools.check.judge.rank_state import Call, GroupKey

MOST_RANKS = 4
LAST = 3  # calls of a group that are made as they were
MESSAGES = ("send", "recv")
MARK = "# Written by distlab check --dump"
# What a rank gives to a call: S are its shapes, as the dump has them.
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


def chosen(verdict: Verdict) -> list[int]:
    """The ranks that matter: all of a small job, else one for each call that ranks wait in and each rank at fault."""
    cases = verdict.past.states
    if len(cases) <= MOST_RANKS:
        return list(range(len(cases)))
    waits = standings(cases, verdict.matching)
    seen: dict[object, int] = {}
    for rank in sorted({rank for finding in verdict.findings for rank in finding.ranks} | set(waits)):
        wait = cases[rank].waits.get(0)
        where = (met_in(wait), wait.place) if wait is not None else (cases[rank].missing, cases[rank].last)
        seen.setdefault(str(where), rank)
    found = list(seen.values())[:MOST_RANKS]
    for rank in range(len(cases)):
        if len(found) < min(2, len(cases)) and rank not in found:
            found.append(rank)
    return sorted(found)


def script_of(verdict: Verdict, name: str) -> str:
    """The text of the script; empty where there is nothing to show."""
    if not verdict.findings:
        return ""
    ranks = chosen(verdict)
    number = {rank: index for index, rank in enumerate(ranks)}
    groups: dict[GroupKey, int] = {}
    by_rank: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(verdict.past.calls, key=lambda call: call.began_s):
        if call.rank in number and len(set(call.group.ranks) & set(ranks)) > 1:
            by_rank[call.rank].append(call)
            if call.group.name and call.group.instance >= 0:
                groups[call.group] = 0
    groups = {group: index for index, group in enumerate(sorted(groups, key=lambda each: (len(each.name), each.name)))}
    begins = {
        group: max(0, min((call.turn for call in last_calls(by_rank, group)), default=0) - LAST)
        for group in {call.group for calls in by_rank.values() for call in calls}
    }
    lines = []
    for rank, calls in by_rank.items():
        rows = list(rows_of(calls, begins, groups, number))
        lines.append(f"    {number[rank]}: [\n" + "".join(f"        {row},\n" for row in rows) + "    ],")
    made = ", ".join(f"dist.new_group({inside(group, number)})" for group in groups)
    who = f"ranks {', '.join(map(str, ranks))} of {len(verdict.past.states)}"
    return HEAD.format(mark=MARK, num_ranks=len(ranks), who=who, name=name, groups=made, calls="\n".join(sorted(lines)))


def last_calls(by_rank: dict[int, list[Call]], group: GroupKey) -> Iterator[Call]:
    """The last call of each rank in a group."""
    for calls in by_rank.values():
        mine = [call for call in calls if call.group == group and call.kind.op not in MESSAGES]
        yield from mine[-1:]


def inside(group: GroupKey, number: dict[int, int]) -> list[int]:
    """The ranks of a group as the script counts them."""
    return [number[rank] for rank in group.ranks if rank in number]


def rows_of(
    calls: Sequence[Call], begins: dict[GroupKey, int], groups: dict[GroupKey, int], number: dict[int, int]
) -> Iterator[tuple[object, ...]]:
    """The calls of one rank as rows of the script."""
    begun: set[GroupKey] = set()
    for call in calls:
        group, kind, counted = call.group, call.kind, call.kind.op not in MESSAGES and call.group.instance >= 0
        members, which = inside(group, number), groups.get(group)
        if counted and group not in begun:
            begun.add(group)
            for _ in range(begins[group]):
                yield "<earlier>", 1, STATEMENTS["all_reduce"], [(1,)], "float32", which, -1, members
        if (counted and call.turn < begins[group]) or (kind.op in MESSAGES and kind.peer not in (-1, *number)):
            continue
        file, _, line = call.place.line.rpartition(":")
        peer = number.get(kind.peer, next((each for each in members if each != number[call.rank]), 0))
        dtype = kind.dtypes[0] if kind.dtypes else "float32"
        at = (file, int(line)) if file and line.isdecimal() else ("<unknown>", 1)
        yield *at, STATEMENTS.get(kind.op, STATEMENTS["barrier"]), [*kind.dims[:1]], dtype, which, peer, members
