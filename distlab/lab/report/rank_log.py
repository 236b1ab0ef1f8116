"""A rank's own log: who it is, what it holds and gets, its first step call by call, how far it is, what it ends with.

Each line is made from a record, by one function a kind of record, when the record is written: so `distlab report RUN
--rank 2` prints the same lines again. No line is longer than 100 columns; in the "normal" log calls that are alike are
one line, so that a rank of any mode says it in 10 to 25 lines, and the "full" one has each call.
"""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from distlab.lab.report import records, table
from distlab.lab.report.records import Record
from distlab.lab.report.table import INDENT
from distlab.lab.report.tables import row as chart_row
from distlab.lab.report.timeline import Span, step_seconds, union_s
from distlab.lab.report.units import byte_unit, human_bytes, milliseconds, name_ranks, three_digits
from distlab.lab.report.verdict import passes

WIDTH = 100  # columns of its file
MOST_LINES = 25  # of a normal log, with its verdict
AT_THE_END = 6  # of them for one each of the five blocks at the end, and the verdict
AFTER_HOLDINGS = AT_THE_END + 4  # of them for what follows: two of its pace, two of its mode, the end
FEW_VARIANTS = 5  # up to which the first step of each may take two lines
CHART_COLUMNS = 40
MANY = 8  # variants: then a normal log leaves out PyTorch's own, and first steps that send the same
FEW_SAMPLES = 8
FEW_LOSSES = 3  # that are told by variant
ANY = -1  # a receive takes from whoever sends
SENDS = {"send": "sent to", "recv": "received from"}
HEADERS_SHARE = 0.01  # of what goes to the peer that gets most: less than that are only acknowledgements and headers
Log = Literal["quiet", "normal", "full"]


def wrapped(word: str, text: str) -> list[str]:
    return table.wrapped(word, text, WIDTH)


def shortened(text: str) -> str:
    return table.shortened(text, WIDTH)


class RankLog:
    """The lines of one rank, record after record."""

    def __init__(self, log: Log = "normal") -> None:
        self.log = log
        self.before: list[Record] = []
        self.said = 0  # lines

    def lines(self, record: Record) -> list[str]:
        """What is said of this record, given those before it."""
        told = LINES_OF.get(type(record))
        lines = told(self, record) if told is not None and self.log != "quiet" else []
        self.before.append(record)
        self.said += len(lines)
        return lines

    def all(self, kind: type[records.Kind]) -> Iterator[records.Kind]:
        """The records of a kind so far."""
        return (record for record in self.before if isinstance(record, kind))

    @property
    def start(self) -> records.Start:
        return next(self.all(records.Start))

    @property
    def timed(self) -> set[str]:
        """The variants whose training is timed."""
        expected = next(self.all(records.Expected), records.Expected([]))
        skipped = {each.variant for each in self.all(records.Skipped)}
        return {variant for variant, name, *_ in expected.claims if name == "timed steps"} - skipped

    def first_step_room(self, variant: str) -> int:
        """How many lines the first step of a variant may take; PyTorch's own has the one in a normal log."""
        if self.log == "full":
            return 1000
        return 2 if len(self.timed) <= FEW_VARIANTS and variant not in self.start.by_torch else 1

    def tells(self, variant: str) -> bool:
        """Whether this variant has a place in the log; in a normal one of many variants PyTorch's own have none."""
        return not self.many or variant not in self.start.by_torch

    @property
    def many(self) -> bool:
        """Whether there are more variants than a normal log has room for."""
        return self.log != "full" and len(self.timed) > MANY


# --- who it is, what it holds and gets ---


def place_lines(log: RankLog, record: records.Placed) -> list[str]:
    """Who this rank is, and who is next to it."""
    start = log.start
    how = f"{start.run_mode} · {start.config.get('LAB_BACKEND')} · {start.title}"
    who = f"rank {start.rank} of {start.world_size} · {how}"
    along = ", ".join(f"{axis} {index} of {size}" for axis, (index, size) in record.axes.items() if size > 1)
    beside = ", ".join(f"{name}: rank {rank}" for name, rank in record.neighbours.items())
    told = textwrap.wrap(f"{who} · {start.host} ({record.ip}) · {record.device}", WIDTH)
    alone = "" if start.world_size > 1 else "one rank alone: there is nothing to communicate"
    return told + wrapped("mesh", "; ".join(filter(None, [along, beside, alone])))


def given_lines(log: RankLog, record: records.Given) -> list[str]:
    """What it works on."""
    sizes = " + ".join(map(str, record.microbatches))
    parts = f", in {len(record.microbatches)} microbatches of {sizes}" if len(record.microbatches) > 1 else ""
    few = (
        record.samples if len(record.samples) <= FEW_SAMPLES or log.log == "full" else record.samples[: FEW_SAMPLES - 1]
    )
    ids = " ".join(map(str, few)) + (f" ... {record.samples[-1]}" if few != record.samples else "")
    return wrapped("gets", f"step {record.step}: {len(record.samples)} of {record.batch} samples{parts}: {ids}")


def note_lines(log: RankLog, record: records.Noted) -> list[str]:
    """What its mode alone can say."""
    room = MOST_LINES - AT_THE_END - log.said if log.log == "normal" else 1000
    return fitted([wrapped(record.heading, record.text)], room)


def holding_lines(log: RankLog, record: records.Holds) -> list[str]:
    """Which parameters it has, by name; once for variants that have the same; in a normal log while there is room."""
    text = holdings(record.parameters, log.log)
    same = [each.variant for each in log.all(records.Holds) if each.parameters == record.parameters]
    if same:
        return wrapped("", f"{record.variant}: as {same[0]}") if log.log == "full" else []
    first = next(log.all(records.Holds), None) is None
    lines = wrapped("holds" if first else "", f"{record.variant}: {text}")
    if log.log == "full":
        return lines
    room = MOST_LINES - AFTER_HOLDINGS - log.said
    return fitted([lines], room - 1) if room > 0 else []


def holdings(parameters: Sequence[Sequence[Any]], log: Log) -> str:
    """How much of a model's parameters this is, and the largest of them by name; alike ones of several layers once."""
    if not parameters:
        return "no parameter"
    cut = sum(bool(each[3]) for each in parameters)
    nbytes = human_bytes(sum(each[4] for each in parameters))
    how = f" ({cut} cut)" if cut else ""
    alike: dict[tuple[str, ...], list[Sequence[Any]]] = defaultdict(list)
    for each in parameters:
        name, shape, dense, ends, _ = each
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        alike[pattern, str(shape), str(dense), str(ends)].append(each)
    groups = sorted(alike.values(), key=lambda group: -sum(each[4] for each in group))
    told = parameter(groups[0]) if log == "normal" else "; ".join(parameter(group, shapes=True) for group in groups)
    return f"{nbytes} in {len(parameters)} tensors{how}{', largest' if log == 'normal' else ':'} {told}"


def parameter(group: Sequence[Sequence[Any]], *, shapes: bool = False) -> str:
    """One parameter, or alike ones of several layers: its shape here, and which part of the whole that is."""
    name, shape, dense, ends, _ = group[0]
    numbers = [part for each in group for part in each[0].split(".") if part.isdecimal()]
    if len(group) > 1 and len(numbers) == len(group):
        own = next(part for part in name.split(".") if part.isdecimal())
        run = f"{numbers[0]}-{numbers[-1]}"
        if list(map(int, numbers)) != list(range(int(numbers[0]), int(numbers[-1]) + 1)):
            run = ",".join(numbers)
        name = name.replace(f".{own}.", f".{run}.", 1) if f".{own}." in name else f"{run}.{name.partition('.')[2]}"
    elif len(group) > 1:
        name = f"{name} and {len(group) - 1} alike"
    size = f" [{'x'.join(map(str, shape)) or '1'}]"
    if not ends:
        return f"{name}{size}"
    axis = next((axis for axis, (one, other) in enumerate(zip(shape, dense, strict=True)) if one != other), 0)
    what = {0: "rows", 1: "columns"}.get(axis, f"axis {axis}:")
    return f"{name}{size if shapes else ''} {what} {ends[0][0]}-{ends[-1][1]} of {dense[axis]}"


# --- its first step ---


class CallGroup(NamedTuple):
    """Calls of one operation with the same ranks."""

    op: str
    ranks: Sequence[int]
    calls: list[Sequence[Any]]

    def told(self, me: int, *, waited: bool) -> str:
        """What they carry, how much, how long they took, and who was waited for."""
        others = [rank for rank in self.ranks if rank != me]
        peers = "any rank" if others == [ANY] else name_ranks(others)
        head = f"{SENDS[self.op]} {peers}" if self.op in SENDS else f"{self.op} with {peers}"
        nbytes = human_bytes(sum(call[3] for call in self.calls))
        took = short_ms(union_s([Span("", "", call[5], call[6]) for call in self.calls]))
        what = max(self.calls, key=lambda call: call[3])[7]
        largest = f", {what}" if what else ""
        number = f"{len(self.calls)} x " if len(self.calls) > 1 else ""
        return f"{number}{head}: {nbytes}, {took} ms{waited_phrase(self.calls) if waited else ''}{largest}"


def short_ms(seconds: float) -> str:
    """Milliseconds, whole ones from ten on."""
    return f"{1000 * seconds:.0f}" if seconds >= 0.01 else milliseconds(seconds)


def waited_phrase(calls: Iterable[Sequence[Any]]) -> str:
    """The rank that these calls waited for most, and how long for that one."""
    by_rank = waits(calls)
    if not by_rank:
        return ""
    (rank, most_s), *_ = by_rank.most_common(1)
    return f", waited {short_ms(most_s)} for rank {rank}"


def waits(calls: Iterable[Sequence[Any]]) -> "Counter[int]":
    """Seconds that were waited, by the rank that was waited for."""
    by_rank: Counter[int] = Counter()
    for call in calls:
        if call[9] >= 0 and call[8] > 0:
            by_rank[call[9]] += call[8]
    return by_rank


def first_step_lines(log: RankLog, record: records.FirstStep) -> list[str]:
    """The passes and the calls of the first step: a chart of its microbatches where it has several, else its times."""
    if not log.tells(record.variant) or (log.many and has_alike(log, record)):
        return []
    room = log.first_step_room(record.variant)
    spans = [Span(*span) for span in record.spans]
    sent = human_bytes(sum(call[2] for call in record.calls))
    step_ms = short_ms(step_seconds([spans]))
    numbers = {span.label for span in spans if span.kind == "forward" and span.label}
    if len(numbers) > 1:
        chart = chart_row(
            sorted(spans, key=lambda span: (span.start_s, -span.end_s)), step_seconds([spans]), CHART_COLUMNS
        )
        head = f"|{chart}| {step_ms} ms, {sent}{waited_phrase(record.calls)}"
    else:
        spent = record.seconds
        own = ", ".join(f"{kind} {short_ms(spent[kind])}" for kind in ("forward", "backward") if spent[kind] > 0)
        calls_s = spent["communication"] + spent["waiting"]
        calls = f"calls {short_ms(calls_s)} ({sent})" if calls_s else f"sent {sent}"
        waited = waited_phrase(record.calls)
        head = f"{step_ms} ms: {', '.join(filter(None, [own, calls]))}{waited}"
        if len(f"{record.variant}: {head}") > WIDTH - INDENT and room == 1:
            head = f"{step_ms} ms: {calls}{waited}"  # the passes are alike in all variants, the calls are not
    first = next(log.all(records.FirstStep), None) is None
    told = wrapped(f"step {record.step}" if first else "", f"{record.variant}: {head}")
    room -= len(told)
    return told + calls_lines(record.calls, log.start.rank, room) if room > 0 else told


def has_alike(log: RankLog, record: records.FirstStep) -> bool:
    """Whether a variant before it called the same with as many bytes."""
    calls = [call[:4] for call in record.calls]
    return any([call[:4] for call in each.calls] == calls for each in log.all(records.FirstStep))


def drawn_step_lines(log: RankLog, record: records.Messages) -> list[str]:
    """What a recorded step sends, of a variant whose training is not timed: one collective of comm."""
    if record.variant in log.timed:
        return []
    first = next(log.all(records.Messages), None) is None
    calls = [[*call, "", 0.0, -1] for call in record.calls]
    room = 1000 if log.log == "full" else 2
    lines = calls_lines(calls, log.start.rank, room, indent=INDENT + len(record.variant) + 2)
    if not lines:
        return []
    head = f"{'all_reduce' if first else '':<{INDENT}}{record.variant}: "
    return [head + lines[0].lstrip(), *lines[1:]]


def calls_lines(
    calls: Sequence[Sequence[Any]], me: int, room: int, indent: int = INDENT + 2
) -> list[str]:  # fmt: skip
    """Each call on a line if there is room, else those of one operation with the same ranks together."""
    if len(calls) <= room:
        groups = [CallGroup(call[0], call[1], [call]) for call in calls]
    else:
        alike: dict[tuple[Any, ...], list[Sequence[Any]]] = defaultdict(list)
        for call in calls:
            alike[call[0], tuple(call[1])].append(call)
        groups = [CallGroup(op, ranks, of) for (op, ranks), of in alike.items()]
    largest = sorted(groups, key=lambda group: -sum(call[3] for call in group.calls))
    kept = largest if len(groups) <= room else largest[: max(1, room)]
    told = [shortened(f"{'':<{indent}}{group.told(me, waited=len(groups) > 1)}") for group in groups if group in kept]
    return told[:room]


def pace_lines(_log: RankLog, record: records.Reached) -> list[str]:
    """How far the timed steps are: the loss, the last step of each variant, and what was sent."""
    losses = {name: f"{loss:.4g}" for name, loss in record.losses.items() if loss is not None}
    told = by_value(losses.items())
    if len({*losses.values()}) > FEW_LOSSES:
        least, most = (pick(losses, key=lambda name: float(losses[name])) for pick in (min, max))
        told = f"{losses[least]} ({least}) to {losses[most]} ({most})"
    called = [seconds for seconds in record.called_seconds.values() if seconds is not None]
    parts = [
        f"loss {told or 'not known here'}",
        f"a step {span_of(record.step_seconds.values())} ms",
        f"in calls {span_of(called)} ms" if called else "",
        "" if record.sent_bytes is None else f"sent {human_bytes(record.sent_bytes)} since",
    ]
    return wrapped(f"step {record.steps}", " · ".join(filter(None, parts)))


def span_of(seconds: Collection[float]) -> str:
    """The least and the most, in milliseconds."""
    return " to ".join(dict.fromkeys(map(milliseconds, (min(seconds), max(seconds))))) if seconds else ""


# --- what it ends with ---


def by_value(values: Iterable[tuple[str, str]], *, named: bool = False) -> str:
    """Names with the same text together: "gpipe, 1f1b 0.39; zbv 0.79"; the text alone if all have it, unless named."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, value in values:
        found[value].append(name)
    if len(found) == 1 and not named:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)} {value}" for value, names in found.items())


def end_lines(log: RankLog, _record: records.End) -> list[str]:
    """Bytes by peer, predicted beside measured, memory, who was waited for, and this rank's checks; in rank 0's full
    log the tables of all ranks follow, which have its memory and checks."""
    tables_follow = log.log == "full" and log.start.rank == 0
    own = [] if tables_follow else [memory_lines(log), checks_lines(log)]
    blocks = [sent_lines(log), predicted_lines(log), waits_lines(log), *own]
    room = MOST_LINES - 1 - log.said if log.log == "normal" else 1000
    return fitted(blocks, room)


def fitted(blocks: Sequence[list[str]], room: int) -> list[str]:
    """Their lines, where there is no room for all without the last of those that have most; one stays of each."""
    while sum(map(len, blocks)) > room and max(map(len, blocks), default=0) > 1:
        cut = max(blocks, key=len)
        cut.pop()
        cut[-1] = shortened(f"{cut[-1]} ...")
    return [line for block in blocks for line in block]


def sent_lines(log: RankLog) -> list[str]:
    wires = list(log.all(records.Wire))
    most: dict[str, float] = defaultdict(float)
    for wire in wires:
        most[wire.variant] = max(most[wire.variant], wire.sent_bytes)
    scale, unit = byte_unit(min(filter(None, most.values()), default=0))  # none is a thousandth of it
    by_variant: dict[str, dict[int, str]] = defaultdict(dict)
    for wire in wires:
        if wire.sent_bytes > HEADERS_SHARE * most[wire.variant] and log.tells(wire.variant):
            by_variant[wire.variant][wire.peer] = three_digits(wire.sent_bytes / scale)
    by_peers: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, sent in by_variant.items():
        alike = len(sent) > 1 and len({*sent.values()}) == 1
        whom = f"to each of {name_ranks(sent)}" if alike else f"to rank{'s' * (len(sent) > 1)} {slashed(sent)}"
        by_peers[whom].append((name, slashed(dict.fromkeys(sent.values()) if alike else sent.values())))
    told = " · ".join(f"{whom}: {by_value(values, named=len(by_peers) > 1)}" for whom, values in by_peers.items())
    return wrapped("sent", f"{unit} a step {told}") if told else []


def slashed(values: Iterable[object]) -> str:
    """As "20.7 / 0.480"."""
    return " / ".join(map(str, values))


def predicted_lines(log: RankLog) -> list[str]:
    claims = [each for each in log.all(records.Comparison) if each.name == "wire bytes" and log.tells(each.variant)]
    scale, unit = byte_unit(min((each.measured for each in claims if each.measured), default=0))
    told = by_value(
        (each.variant, slashed(three_digits(nbytes / scale) for nbytes in (each.predicted, each.measured)))
        for each in claims
    )
    return wrapped("predicted", f"/ measured {unit} on the wire: {told}") if told else []


def memory_lines(log: RankLog) -> list[str]:
    """Bytes at rest by class and the peak, of each variant."""
    classes = list(log.all(records.Classes))
    if log.log == "full":
        values = []
        for each in classes:
            parts = ", ".join(f"{kind} {human_bytes(nbytes)}" for kind, nbytes in each.rest_bytes.items() if nbytes)
            values.append((each.variant, f"{parts} at rest, peak {human_bytes(sum(each.peak_bytes.values()))}"))
        return wrapped("memory", by_value(values)) if values else []
    totals = {
        each.variant: [sum(of.values()) for of in (each.rest_bytes, each.peak_bytes)]
        for each in classes
        if log.tells(each.variant)
    }
    scale, unit = byte_unit(max(map(max, totals.values()), default=0))
    told = by_value((name, slashed(three_digits(nbytes / scale) for nbytes in of)) for name, of in totals.items())
    return wrapped("memory", f"{unit} at rest / peak: {told}") if told else []


def waits_lines(log: RankLog) -> list[str]:
    by_rank: Counter[int] = Counter()
    for step in log.all(records.FirstStep):
        by_rank.update(waits(step.calls))
    told = ", ".join(f"rank {rank} {milliseconds(seconds)} ms" for rank, seconds in by_rank.most_common())
    return wrapped("waited", f"in the first steps for {told}") if told else []


def checks_lines(log: RankLog) -> list[str]:
    """Whether the claims of this rank that decide passed, and which did not. Their number is not that of the run, which
    counts a claim of several ranks once."""
    deciding = [each for each in log.all(records.Comparison) if each.decides]
    made: list[records.Check | records.Comparison] = [*log.all(records.Check), *deciding]
    failed = dict.fromkeys(f"{each.variant} {each.name}".strip() for each in made if not passes(each))
    told = "all passed on this rank" if made else "none was made on this rank"
    return wrapped("checks", f"FAILED on this rank: {', '.join(failed)}" if failed else told)


def verdict_of_all(verdict: str, folder: Path) -> str:
    """The last line of a rank that does not speak for all."""
    return shortened(f"{verdict.upper():<{INDENT}}of all ranks · report {folder / 'report.html'}")


LINES_OF: dict[type[Any], Callable[[RankLog, Any], list[str]]] = {
    records.Placed: place_lines, records.Given: given_lines, records.Noted: note_lines, records.Holds: holding_lines,
    records.FirstStep: first_step_lines, records.Messages: drawn_step_lines, records.Reached: pace_lines,
    records.End: end_lines,
}  # fmt: skip
