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
from distlab.tools.check.judge import parting
from distlab.tools.check.judge.coordinator import Doctor
from distlab.tools.check.judge.matching import Line
from distlab.tools.check.judge.rank_state import CHECKS, DEVICES, RankState

CONTROL = "tests/tools/check/test_faults.py::test_it_is_named"
OF_DEVICES = "tests/tools/check/judge/test_parts.py::test_two_ranks_on_one_gpu_of_a_host_are_found"
MOST_LINES = 60
SHOWN = 3  # lines of the script in the log
OFTEN, MOSTLY = 10, 0.8  # share of a line's calls from which a rank counts as late there
WIRE = "Wire: who sent how much to whom"
MAKERS = ("init_process_group", "new_group")


def written(doctor: Doctor) -> Iterator[records.Record]:
    """Yield the records of rank 0, in the order of the page."""
    if doctor.refused:
        yield records.Failed(2, doctor.refused)
        return
    for finding in doctor.findings:
        yield records.Finding(finding.check, finding.sentence, list(finding.ranks))
    yield from doctor.records
    yield from doctor.compared
    for name in CHECKS:
        found = [finding.sentence for finding in doctor.findings if finding.check == name]
        control = OF_DEVICES if name == DEVICES else CONTROL
        detail = "; ".join(found[:4]) or ("" if doctor.whole else UNTIL_ENDED)
        yield records.Check("", name, len(found), 0, detail=detail, control=control, unit=FINDINGS)
    for sentence in questions(doctor):
        yield records.Said("question", sentence)
    for sentence, ranks in doctor.changed.items():
        yield records.Said("changed", f"{sentence} (on {len(set(ranks))} ranks)")
    for finding in doctor.findings:
        if finding.rows:
            rows = [list(row) for row in finding.rows]
            title = f"Where each rank was: {WHEN_FAILED.get(finding.check, finding.check)}"
            yield records.Table(title, ["rank", "line", "call", "", "code"], rows)
    doctor.matching.lateness.settle()
    lines = slowest_lines(doctor)
    if lines:
        columns = ["line", "call", "calls", "bytes a call", "ms a call", "comes last", "the others wait, ms"]
        rows = [script_line_row(line, steps(doctor)) for line in lines[:MOST_LINES]]
        yield records.Table("Collectives by line", columns, rows)
    for sentence in late(lines, steps(doctor)):
        yield records.Said("late", sentence)
    yield from wire(doctor.cases)
    yield from ended(doctor.cases)


def log_lines(doctor: Doctor) -> Iterator[str]:
    """Yield the log's lines besides the checks: tracebacks, places of ranks, and questions."""
    for finding in doctor.findings:
        yield from finding.traceback.rstrip().splitlines()
        yield from where_lines(finding.rows)
    yield from format_tables(doctor.records)
    if doctor.records:  # a proof has few, equal steps
        yield from format_tables(wire(doctor.cases))
    for sentence in questions(doctor):
        yield from wrapped("question", sentence)
    yield from format_tables(doctor.compared)
    lines = slowest_lines(doctor) if not doctor.findings and not doctor.compared else []
    for line in lines[:SHOWN]:
        place, op, calls, nbytes, took_ms, last, wait = script_line_row(line, steps(doctor))
        cells = f"{place}  {op}  {counted(calls, 'calls')} of {human_bytes(nbytes)}  {took_ms:.1f} ms"
        who = f", {last} last, the others wait {wait}" if last else ""
        yield from wrapped("calls", f"{cells}{who}")
    for sentence in late(lines, steps(doctor)):
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


def questions(doctor: Doctor) -> Iterator[str]:
    """Yield questions about what may be intended; a proof has none."""
    if not doctor.records and not doctor.refused:
        yield from doctor.quiet.questions()
        if not doctor.findings:
            yield from parting.questions([case.course for case in doctor.cases])
            if len(doctor.cases) > 1 and not any(case.num_calls for case in doctor.cases):
                yield "ranks made a process group but no call in it, so nothing was compared; is that intended?"


def slowest_lines(doctor: Doctor) -> list[Line]:
    """Return the matched lines of the script, the slowest first."""
    lines = [line for line in doctor.matching.lateness.lines.values() if line.op not in MAKERS]
    return sorted(lines, key=lambda line: -sum(line.waited_s.values()) - line.took_s)


def steps(doctor: Doctor) -> int:
    """Return the optimizer steps that every rank took; 0 without any."""
    return min((case.steps for case in doctor.cases), default=0)


def late(lines: list[Line], steps: int) -> Iterator[str]:
    for line in lines[:SHOWN]:
        rank, times = line.last.most_common(1)[0]
        wait_ms = 1000 * waited(line) / line.calls
        if line.size > 1 and line.calls >= OFTEN and times > MOSTLY * line.calls and wait_ms > 1:
            yield (
                f"rank {rank} comes last in {times / line.calls:.0%} of the {line.op}s of {line.place}; the others wait"
                f" {wait(line, steps)}"
            )


def waited(line: Line) -> float:
    """Return the total seconds that ranks other than the last waited, averaged over them."""
    return sum(line.waited_s.values()) / max(1, line.size - 1)


def wait(line: Line, steps: int) -> str:
    """Return how long the others wait for the last rank: per step, or per call if the line is not in each step."""
    in_steps = 0 < steps <= line.calls
    return f"{1000 * waited(line) / (steps if in_steps else line.calls):.1f} ms a {'step' if in_steps else 'call'}"


def script_line_row(line: Line, steps: int) -> list[Any]:
    rank, times = line.last.most_common(1)[0]
    last = f"rank {rank} in {times / line.calls:.0%}" if line.size > 1 else ""
    return [
        str(line.place), line.op, line.calls, line.nbytes // line.calls, 1000 * line.took_s / line.calls, last,
        wait(line, steps),
    ]  # fmt: skip


def format_tables(tables: Iterable[records.Record]) -> Iterator[str]:
    for record in tables:
        if isinstance(record, records.Table):
            yield "\n".join([record.title, *aligned(record.columns, record.rows)])


def wire(cases: list[RankState]) -> Iterator[records.Record]:
    """Yield tables of the bytes sent between ranks, and of the calls; in a proof per step."""
    owner = {(near, far): case.rank for case in cases for near, far in case.sockets}
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for case in cases:
        for (near, far), nbytes in case.sockets.items():
            peer = owner.get((far, near))
            if peer is not None and peer != case.rank:
                sent[case.rank, peer] += nbytes
    size, steps = len(cases), min(case.counted_steps for case in cases)
    if sent and size > 1:
        rows = []
        for case in cases:
            to = [round(sent.get((case.rank, peer), 0) / max(1, steps)) for peer in range(size)]
            rows.append([f"rank {case.rank}", *to, sum(to), round(case.called_bytes / max(1, steps))])
        columns = ["bytes sent by", *(f"to rank {peer}" for peer in range(size)), "in all", "called"]
        of_what = f"Wire: who sent how much to whom in a step, on average of {steps}" if steps else WIRE
        yield records.Table(of_what, columns, rows)


def ended(cases: list[RankState]) -> Iterator[records.Record]:
    columns = ["rank", "calls", "optimizer steps", "peak memory of the process, MB"]
    yield records.Table(
        "Ranks of the script", columns,
        [[f"rank {case.rank}", case.num_calls, case.steps, round(case.peak_bytes / 1e6)] for case in cases],
    )  # fmt: skip


# The timeline of a rank: its calls from their begin to their end, and the waits between, from what its script told.

MOST = 400  # calls of a rank that are drawn
# What each operation is drawn as; the label tells it apart.
KINDS = {
    "all_reduce": "all_reduce", "reduce": "all_reduce", "broadcast": "all_gather", "all_gather": "all_gather",
    "gather": "all_gather", "reduce_scatter": "reduce_scatter", "scatter": "reduce_scatter", "send": "send",
    "all_to_all": "reduce_scatter", "recv": "receive", "barrier": "wait", "monitored_barrier": "wait",
}  # fmt: skip

Span = tuple[str, str, float, float]  # kind, label, start and end in seconds


def spans_of(lines: Iterable[bytes], ended_s: float = math.inf) -> tuple[list[Span], int]:
    """The first calls as spans, and how many more there were; what a script was in when it was ended, at `ended_s`, is
    a wait until then: what is told later comes of other ranks' end."""
    places: dict[int, str] = {}
    kinds: dict[int, str] = {}
    begun: dict[int, tuple[str, str, float]] = {}
    entered: dict[int, tuple[str, str, float]] = {}  # by thread, what waits in no call of a group
    found: list[Span] = []
    more, over = 0, False
    for line in lines:
        with suppress(Exception):  # a line that is not as its kind is written: the script has the pipe, too
            told: list[Any] = json.loads(line)
            if told[0] == "place":
                places[told[1]] = told[2] or told[3]
            elif told[0] == "kind":
                kinds[told[1]] = told[2]
            elif told[0] == "call":
                op = kinds[told[4]]
                begun[told[1]] = KINDS[op], f"{op} {places[told[2]]}", float(told[7])
            elif told[0] in ("ended", "raised"):
                over = over or told[-1] <= ended_s
            elif told[0] == "enter":
                entered[told[4]] = "wait", f"{told[1]} {places[told[3]]}", float(told[5])
            elif told[0] == "leave" and told[-1] <= ended_s:
                del entered[told[1]]
            elif told[0] in ("end", "waited") and told[1] in begun and told[-1] <= ended_s:
                span = *begun.pop(told[1]), float(told[-1])
                more += len(found) == MOST
                found += [span] if len(found) < MOST else []
    last = max([0.0 if over or ended_s == math.inf else ended_s, *(end for *_, end in found)])
    for kind, label, began_s in [*begun.values(), *entered.values()]:  # drawn however many there were
        what = (kind, label) if over else ("wait", f"{label}, until the run was ended")
        found.append((*what, began_s, max(last, began_s)))
    return sorted(found, key=lambda span: span[2]), more
