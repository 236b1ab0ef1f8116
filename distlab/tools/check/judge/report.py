"""The records that rank 0 writes of a check: findings, and tables by line, peer and rank."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from distlab.lab.report import records
from distlab.lab.report.sentences import FINDINGS, UNTIL_ENDED, WHEN_FAILED
from distlab.lab.report.table import INDENT, WIDTH, aligned, shortened, wrapped
from distlab.lab.report.units import counted, human_bytes
from distlab.tools.check.judge import divergence
from distlab.tools.check.judge.coordinator import Coordinator
from distlab.tools.check.judge.matching import Line
from distlab.tools.check.judge.rank_state import CHECKS, DEVICES, RankState

CONTROL = "tests/tools/check/test_faults.py::test_it_is_named"
OF_DEVICES = "tests/tools/check/judge/test_parts.py::test_two_ranks_on_one_gpu_of_a_host_are_found"
MOST_LINES = 60
SHOWN = 3  # lines of the script in the log
OFTEN, MOSTLY = 10, 0.8  # share of a line's calls from which a rank counts as late there
TRAFFIC = "Traffic: bytes sent from rank to rank"
MAKERS = ("init_process_group", "new_group")


def records_of(coordinator: Coordinator) -> Iterator[records.Record]:
    """Yield the records of rank 0, in the order of the page."""
    if coordinator.refused:
        yield records.Failed(2, coordinator.refused)
        return
    for finding in coordinator.findings:
        yield records.Finding(finding.check, finding.sentence, list(finding.ranks))
    yield from coordinator.records
    yield from coordinator.compared
    for name in CHECKS:
        found = [finding.sentence for finding in coordinator.findings if finding.check == name]
        control = OF_DEVICES if name == DEVICES else CONTROL
        detail = "; ".join(found[:4]) or ("" if coordinator.completed else UNTIL_ENDED)
        yield records.Check("", name, len(found), 0, detail=detail, control=control, unit=FINDINGS)
    for sentence in questions(coordinator):
        yield records.Said("question", sentence)
    for sentence, ranks in coordinator.changed.items():
        yield records.Said("changed", f"{sentence} (on {len(set(ranks))} ranks)")
    for finding in coordinator.findings:
        if finding.rows:
            rows = [list(row) for row in finding.rows]
            title = f"Where each rank was: {WHEN_FAILED.get(finding.check, finding.check)}"
            yield records.Table(title, ["rank", "line", "call", "", "code"], rows)
    coordinator.matching.lateness.add_durations()
    lines = slowest_lines(coordinator)
    if lines:
        columns = ["line", "call", "calls", "bytes per call", "ms per call", "comes last", "the others wait, ms"]
        rows = [script_line_row(line, steps(coordinator)) for line in lines[:MOST_LINES]]
        yield records.Table("Collectives by line", columns, rows)
    for sentence in late_ranks(lines, steps(coordinator)):
        yield records.Said("late", sentence)
    yield from traffic(coordinator.states)
    yield from rank_table(coordinator.states)


def log_lines(coordinator: Coordinator) -> Iterator[str]:
    """Yield the log's lines besides the checks: tracebacks, places of ranks, and questions."""
    for finding in coordinator.findings:
        yield from finding.traceback.rstrip().splitlines()
        yield from where_lines(finding.rows)
    yield from format_tables(coordinator.records)
    if coordinator.records:  # a proof has few, equal steps
        yield from format_tables(traffic(coordinator.states))
    for sentence in questions(coordinator):
        yield from wrapped("question", sentence)
    yield from format_tables(coordinator.compared)
    lines = slowest_lines(coordinator) if not coordinator.findings and not coordinator.compared else []
    for line in lines[:SHOWN]:
        place, op, calls, nbytes, took_ms, last, waited = script_line_row(line, steps(coordinator))
        cells = f"{place}  {op}  {counted(calls, 'calls')} of {human_bytes(nbytes)}  {took_ms:.1f} ms"
        who = f", last: {last}, the others wait {waited}" if last else ""
        yield from wrapped("calls", f"{cells}{who}")
    for sentence in late_ranks(lines, steps(coordinator)):
        yield from wrapped("late", sentence)


def where_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each rank's place, and below it that line of the script."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    for row in rows:
        *cells, code = row
        columns = "  ".join(cell.ljust(width) for cell, width in zip(cells, [*widths, 0], strict=True)).rstrip()
        yield from wrapped("where", columns if len(columns) <= WIDTH - INDENT else "  ".join(cells))
        if code:
            yield shortened(f"{'code':<{INDENT}}{' ' * widths[0]}  {code}", WIDTH)


def questions(coordinator: Coordinator) -> Iterator[str]:
    """Yield questions about what may be intended; a proof has none."""
    if not coordinator.records and not coordinator.refused:
        yield from coordinator.silent_faults.questions()
        if not coordinator.findings:
            yield from divergence.questions([state.history for state in coordinator.states])
            if len(coordinator.states) > 1 and not any(state.num_calls for state in coordinator.states):
                yield "ranks created a process group but made no call in it, so nothing was compared; is that intended?"


def slowest_lines(coordinator: Coordinator) -> list[Line]:
    """Return the matched lines of the script, the slowest first."""
    lines = [line for line in coordinator.matching.lateness.lines.values() if line.op not in MAKERS]
    return sorted(lines, key=lambda line: -sum(line.waited_s.values()) - line.took_s)


def steps(coordinator: Coordinator) -> int:
    """Return the optimizer steps that every rank took; 0 without any."""
    return min((state.steps for state in coordinator.states), default=0)


def late_ranks(lines: list[Line], steps: int) -> Iterator[str]:
    for line in lines[:SHOWN]:
        rank, times = line.last.most_common(1)[0]
        wait_ms = 1000 * waited_s(line) / line.calls
        if line.size > 1 and line.calls >= OFTEN and times > MOSTLY * line.calls and wait_ms > 1:
            yield (
                f"rank {rank} comes last in {times / line.calls:.0%} of the {line.op}s at {line.place}; the others wait"
                f" {wait_text(line, steps)}"
            )


def waited_s(line: Line) -> float:
    """Return the total seconds that ranks other than the last waited, averaged over them."""
    return sum(line.waited_s.values()) / max(1, line.size - 1)


def wait_text(line: Line, steps: int) -> str:
    """Return how long the others wait for the last rank: per step, or per call if the line is not in each step."""
    in_steps = 0 < steps <= line.calls
    return f"{1000 * waited_s(line) / (steps if in_steps else line.calls):.1f} ms per {'step' if in_steps else 'call'}"


def script_line_row(line: Line, steps: int) -> list[Any]:
    rank, times = line.last.most_common(1)[0]
    last = f"rank {rank} in {times / line.calls:.0%}" if line.size > 1 else ""
    return [
        str(line.place), line.op, line.calls, line.nbytes // line.calls, 1000 * line.took_s / line.calls, last,
        wait_text(line, steps),
    ]  # fmt: skip


def format_tables(tables: Iterable[records.Record]) -> Iterator[str]:
    for record in tables:
        if isinstance(record, records.Table):
            yield "\n".join([record.title, *aligned(record.columns, record.rows)])


def traffic(states: list[RankState]) -> Iterator[records.Record]:
    """Yield tables of the bytes sent between ranks, and of the calls; in a proof per step."""
    owner = {(near, far): state.rank for state in states for near, far in state.sockets}
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for state in states:
        for (near, far), nbytes in state.sockets.items():
            peer = owner.get((far, near))
            if peer is not None and peer != state.rank:
                sent[state.rank, peer] += nbytes
    size, steps = len(states), min(state.counted_steps for state in states)
    if sent and size > 1:
        rows = []
        for state in states:
            to = [round(sent.get((state.rank, peer), 0) / max(1, steps)) for peer in range(size)]
            rows.append([f"rank {state.rank}", *to, sum(to), round(state.called_bytes / max(1, steps))])
        columns = ["bytes sent by", *(f"to rank {peer}" for peer in range(size)), "in all", "called"]
        of_what = f"{TRAFFIC} per step, on average of {counted(steps, 'steps')}" if steps else TRAFFIC
        yield records.Table(of_what, columns, rows)


def rank_table(states: list[RankState]) -> Iterator[records.Record]:
    columns = ["rank", "calls", "optimizer steps", "peak memory of the process, MB"]
    yield records.Table(
        "Ranks of the script", columns,
        [[f"rank {state.rank}", state.num_calls, state.steps, round(state.peak_bytes / 1e6)] for state in states],
    )  # fmt: skip


# The timeline of a rank: its calls from begin to end and the waits between, from the reports of its script.

MOST = 400  # calls of a rank that are drawn
# What each operation is drawn as; the label tells it apart.
KINDS = {
    "all_reduce": "all_reduce", "reduce": "all_reduce", "broadcast": "all_gather", "all_gather": "all_gather",
    "gather": "all_gather", "reduce_scatter": "reduce_scatter", "scatter": "reduce_scatter", "send": "send",
    "all_to_all": "reduce_scatter", "recv": "receive", "barrier": "wait", "monitored_barrier": "wait",
}  # fmt: skip

Span = tuple[str, str, float, float]  # kind, label, start and end in seconds


def spans_of(lines: Iterable[bytes], ended_s: float = math.inf) -> tuple[list[Span], int]:
    """Return the first calls as spans, and how many more there were. What a script was in when the run was ended, at
    `ended_s`, is a wait until then: later reports are consequences of other ranks' end."""
    places: dict[int, str] = {}
    kinds: dict[int, str] = {}
    open_calls: dict[int, tuple[str, str, float]] = {}
    entered: dict[int, tuple[str, str, float]] = {}  # by thread, waits outside calls of a group
    found: list[Span] = []
    more, over = 0, False
    for line in lines:
        with suppress(Exception):  # a malformed line: the script has the pipe, too
            report: list[Any] = json.loads(line)
            if report[0] == "place":
                places[report[1]] = report[2] or report[3]
            elif report[0] == "kind":
                kinds[report[1]] = report[2]
            elif report[0] == "call":
                op = kinds[report[4]]
                open_calls[report[1]] = KINDS[op], f"{op} {places[report[2]]}", float(report[7])
            elif report[0] in ("ended", "raised"):
                over = over or report[-1] <= ended_s
            elif report[0] == "enter":
                entered[report[4]] = "wait", f"{report[1]} {places[report[3]]}", float(report[5])
            elif report[0] == "leave" and report[-1] <= ended_s:
                del entered[report[1]]
            elif report[0] in ("end", "waited") and report[1] in open_calls and report[-1] <= ended_s:
                span = *open_calls.pop(report[1]), float(report[-1])
                more += len(found) == MOST
                found += [span] if len(found) < MOST else []
    last = max([0.0 if over or ended_s == math.inf else ended_s, *(end for *_, end in found)])
    for kind, label, began_s in [*open_calls.values(), *entered.values()]:  # drawn however many there were
        what = (kind, label) if over else ("wait", f"{label}, until the run was ended")
        found.append((*what, began_s, max(last, began_s)))
    return sorted(found, key=lambda span: span[2]), more
