"""The tables of a run, a function each: what was proven, measured beside predicted, in memory, and where time went.

Log and page are both made of them; the log leaves out some columns.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from distlab.lab.report.records import Comparison, Profile, Ranks, Run, select
from distlab.lab.report.sentences import UNSEEN, claim_name
from distlab.lab.report.table import Column, Kind, Table, Verdict, Wrong
from distlab.lab.report.timeline import OWN_WORK, Span, bubble_of, step_seconds, timelines
from distlab.lab.report.units import (
    allowed,
    byte_unit,
    difference,
    human_bytes,
    milliseconds,
    quantity,
    share,
    three_digits,
)
from distlab.lab.report.verdict import first, pytorch_own, slowest

PROOF = ("gradients", "weights", "losses")
TRAFFIC = ("wire bytes", "called bytes")
# What the timed steps are held to, by the names of their checks: distlab/lab/verify/audit.py.
TIMED = ("timed losses", "audited loss", "audited weights", "audited optimizer", "timed replicas", "timed steps")
DRAWN, ON_WIRE = "drawn bytes", "wire as drawn"  # of the report's picture: it is there that they are told
REST = "rest bytes"  # of memory, the comparison with the formula
OUTSIDE = ("process", "container", "allocator")  # who else counts, each at rest and, some, at the peak
MEMORY = (REST, *(f"{source}{moment} bytes" for source in OUTSIDE for moment in ("", " peak")))
MOST_PROFILES = 64  # rows, of variants and ranks: 14 of 8 took 26 kB of the page


def proof(run: Run) -> Table:
    """A row a variant: its largest differences from the single-process reference.

    The heading is that of the first one, and a row to which another type or tolerance applies says so.
    """
    proven = _by_variant(run["checks"], PROOF)
    first_row = list(next(iter(proven.values()), {}).values())
    common = [] if any(check["unit"] for check in first_row) else sorted({check["tolerance"] for check in first_row})
    rows = [
        [
            name or "all",
            *(_difference(row.get(kind)) for kind in PROOF),
            Verdict(verdict(row.values()), "".join(f" {each}" for each in _own_tolerances(row.values(), common))),
        ]
        for name, row in proven.items()
    ]
    span = " to ".join(f"{tolerance:g}" for tolerance in (*common[:1], *common[1:][-1:]))
    return Table(
        [
            Column(f"{'float64, ' if common else ''}against the reference"),
            *(Column(kind, "value") for kind in PROOF),
            Column(f"(tolerance {span})" if common else ""),
        ],
        rows,
    )


def _by_variant(checks: Iterable[Run], names: Container[str]) -> dict[str, dict[str, Run]]:
    """The checks of these names, by variant and by name."""
    found: dict[str, dict[str, Run]] = {}
    for check in checks:
        if check["name"] in names:
            found.setdefault(check["variant"], {})[check["name"]] = check
    return found


def _difference(check: Run | None) -> str:
    if check is None:
        return "-"
    seen = difference(check["max_abs_diff"])
    return seen if check["passed"] else Wrong(seen)


def _own_tolerances(checks: Iterable[Run], common: Container[float]) -> list[str]:
    """The tolerances of differences that have a unit, or whose tolerance is not a `common` one."""
    own = [each for each in checks if each["unit"] or each["tolerance"] not in common]
    told = (allowed(each) if each["unit"] else f"{each['tolerance']:g} in float64" for each in own)
    return list(dict.fromkeys(f"(tolerance {each})" for each in told))


def timed(run: Run) -> Table:
    """A row a variant: the differences of its timed steps, each beside its tolerance."""
    found = _by_variant(run["checks"], TIMED)
    kinds = [kind for kind in TIMED if any(kind in row for row in found.values())]
    rows = [
        [name, *(_of_allowed(row[kind]) if kind in row else "-" for kind in kinds), Verdict(verdict(row.values()))]
        for name, row in found.items()
    ]
    proven = any(kind in TIMED[:4] for kind in kinds)
    heading = "difference / tolerance" if proven else "not compared with the reference: LAB_PROOF=0"
    return Table([Column(heading), *(Column(kind, "value") for kind in kinds), Column("")], rows)


def _of_allowed(check: Run) -> str:
    """A difference beside its tolerance, where it has one."""
    off = difference(check["max_abs_diff"])
    return f"{off} / {difference(check['tolerance'])}" if check["tolerance"] else off


def checks(of: Iterable[Run]) -> Table:
    """A row a check, such as those that the table of the proof does not show."""
    return Table(
        [
            Column("check"), Column("largest difference", "value"), Column("tolerance", "value", inline="tolerance "),
            Column(""), Column("", in_log=False),
        ],
        [
            [
                claim_name(each), difference(each["max_abs_diff"]), allowed(each), Verdict(verdict([each])),
                each["detail"],
            ]
            for each in of
        ],
        titled=False,
    )  # fmt: skip


def comparisons(of: Iterable[Run]) -> Table:
    """A row a comparison: predicted beside what the rank measured that was farthest off."""
    return Table(
        [
            Column("comparison"), Column("predicted", "value", inline="predicted "),
            Column("measured", "value", inline="measured "), Column("on rank", "number", in_log=False),
            Column("allowed ±", "value", in_log=False), Column(""), Column("formula", in_log=False),
        ],
        [
            [
                claim_name(each), quantity(each["predicted"], each["unit"]), quantity(each["measured"], each["unit"]),
                each["rank"],
                quantity(each["tolerance"], each["unit"]) if each["decides"] else each.get("shown", ""),
                Verdict(verdict([each])), each["formula"],
            ]
            for each in of
        ],
        titled=False,
    )  # fmt: skip


def measured(run: Run, records: Ranks) -> Table:
    """A row a variant: time of its slowest rank, bytes of the rank that sends most."""
    own = pytorch_own(run)
    own_s = next((slowest(variant["step_seconds"]) for variant in run["variants"] if variant["name"] == own), None)
    rows = []
    traffic = {each["name"]: _traffic(each, records) for each in run["variants"]}
    scale, unit = byte_unit(max((value for each in traffic.values() for value in each if value), default=0))
    for variant in run["variants"]:
        seconds = slowest(variant["step_seconds"])
        cpu_s = [value for value in variant["cpu_seconds"] if value is not None]
        claims = [c for c in run["comparisons"] if c["variant"] == variant["name"] and c["name"] in TRAFFIC]
        ratio = f"{seconds / own_s:.2f}" if seconds and own_s else "-"
        sent = ["-" if value is None else three_digits(value / scale) for value in traffic[variant["name"]]]
        rows.append(
            [
                variant["name"], milliseconds(seconds), *([ratio] if own else []),
                milliseconds(sum(cpu_s) if cpu_s else None), *sent, Verdict(verdict(claims), _wide(claims)),
            ]
        )  # fmt: skip
    config = first(records).config
    columns = [
        Column(f"{config.get('LAB_STEPS')} steps, LAB_DTYPE={config.get('LAB_DTYPE')}"),
        Column("ms a step", "number"),
        *([Column(f"x {own}", "number")] if own else []),
        Column("CPU ms, all ranks", "number", in_log=False),
        *(Column(source, "number") for source in (f"{unit} predicted", "called", "wire")),
        Column(""),
    ]
    return Table(columns, rows)


class Plan(NamedTuple):
    """What the planner says of a run: of the variants that it knows seconds of a step and bytes at the peak, and in
    words where its numbers are from, or why there are none."""

    variants: dict[str, tuple[float, float]]
    told: list[str]


def planned(run: Run, plan: Plan) -> Table:
    """A row for each variant that the planner knows: predicted beside the slowest rank's step and the fullest's
    peak."""
    rows = []
    for variant in run["variants"]:
        step_s, held = slowest(variant["step_seconds"]), variant["peak_by_class"]
        rank = fullest(held)
        if variant["name"] not in plan.variants or not step_s or rank is None:
            continue
        planned_s, planned_bytes = plan.variants[variant["name"]]
        peak = sum(held[rank].values())
        rows.append(
            [
                variant["name"], milliseconds(planned_s), milliseconds(step_s), _error(planned_s, step_s),
                human_bytes(planned_bytes), human_bytes(peak), _error(planned_bytes, peak),
            ]
        )  # fmt: skip
    columns = ("ms planned", "ms a step", "error", "peak planned", "peak", "error")
    return Table([Column("variant"), *(Column(title, "number") for title in columns)], rows)


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}" if measured else "-"


def _traffic(variant: Run, records: Ranks) -> list[float | None]:
    """Bytes that the rank sends that sends most: as predicted, as called and on the wire."""
    return [most_predicted(records, variant["name"]), *(slowest(variant[of]) for of in ("called_bytes", "wire_bytes"))]


def most_predicted(records: Ranks, variant: str) -> float | None:
    """Of the bytes that a rank sends: each has its own formula."""
    claims = [each for _, each in select(records, Comparison) if each.variant == variant and each.name in TRAFFIC]
    return max((each.predicted for each in claims), default=None)


def _wide(claims: Iterable[Run]) -> str:
    """How far bytes may be off, where that is more than a tenth of what is predicted: each message has a header."""
    wide = [c["tolerance"] for c in claims if c["decides"] and c["tolerance"] > 0.1 * c["predicted"]]
    return f", ± {human_bytes(max(wide))}" if wide else ""


def memory(run: Run, records: Ranks) -> Table:
    """A row a variant: what its fullest rank held, by class and as the process and the container count it.

    Cells are "at rest / at the peak", one number where they are the same; no column is empty.
    """
    amounts: dict[str, dict[str, list[float]]] = {}
    for variant in run["variants"]:
        rank = fullest(variant["peak_by_class"])
        if rank is not None:
            amounts[variant["name"]] = _amounts(variant, rank, records)
    scale, unit = byte_unit(max((max(row["total"]) for row in amounts.values()), default=0))
    kinds = dict.fromkeys(kind for row in amounts.values() for kind in row)
    filled = [kind for kind in kinds if any(any(row.get(kind, [])) for row in amounts.values())]
    claims = {c["variant"]: c for c in run["comparisons"] if c["name"] == REST}
    rows = [
        [
            name,
            *(_memory_cell(row.get(kind, []), scale) for kind in filled),
            Verdict(verdict([claims[name]] if name in claims else [])),
        ]
        for name, row in amounts.items()
    ]
    columns = [Column(f"{unit} at rest / at the peak"), *(Column(kind, "number") for kind in filled), Column("")]
    return Table(columns, rows)


def fullest(held: Iterable[dict[str, int] | None]) -> int | None:
    """The rank that holds most, of all ranks' bytes by class; None where no rank wrote any."""
    totals = {rank: sum(of_rank.values()) for rank, of_rank in enumerate(held) if of_rank}
    return max(totals, key=lambda rank: totals[rank], default=None)


def _amounts(variant: Run, rank: int, records: Ranks) -> dict[str, list[float]]:
    """Bytes of one rank by column: at rest and at the peak, or at rest alone."""
    rest, peak = variant["rest_by_class"][rank], variant["peak_by_class"][rank]
    found = {kind: [rest[kind], peak.get(kind, 0)] for kind in rest}
    found["total"] = [sum(rest.values()), sum(peak.values())]
    seen = {
        entry.name: entry for of, entry in select(records, Comparison) if (of, entry.variant) == (rank, variant["name"])
    }
    if REST in seen:
        found["rest by formula"] = [seen[REST].predicted]
    for source in OUTSIDE:
        names = [f"{source}{moment} bytes" for moment in ("", " peak")]
        found[source] = [seen[name].measured for name in names if name in seen]
    return {kind: values for kind, values in found.items() if values}


def _memory_cell(values: Sequence[float], scale: float) -> str:
    numbers = [three_digits(value / scale) for value in values]
    return " / ".join(dict.fromkeys(numbers)) or "-"


# Where the time of a step went, and who is slowest: the rank with the most time in work of its own. Time in
# communication does not tell: a collective ends for all at once, so the ranks that wait for a slow one spend it inside
# the call, and a total with communication would name any of them. (DDP waits unmarked inside its backward pass: there
# ranks come out alike.)

CLASSES = ("data", "forward", "backward", "communication", "optimizer", "waiting")
INSIDE = ("communication", "waiting")
NOTHING = "-"  # no time at all
Profiles = list[dict[str, float] | None]  # seconds of a step by class, of each rank


def profiles(records: Ranks, world_size: int) -> dict[str, Profiles]:
    """By variant where the time of a step went on each rank; None where a rank wrote nothing."""
    found: dict[str, Profiles] = {}
    for rank, profile in select(records, Profile):
        found.setdefault(profile.variant, [None] * world_size)[rank] = profile.seconds
    return found


def own_work(seconds: dict[str, float]) -> float:
    """Seconds of a step in which no other rank can hold this one up."""
    return sum(seconds.get(kind, 0.0) for kind in OWN_WORK)


def slowest_rank(of_ranks: Profiles) -> tuple[int, float]:
    """The rank with the most work of its own, and its ratio to the rank with the least (infinite if that has none)."""
    work = {rank: own_work(seconds) for rank, seconds in enumerate(of_ranks) if seconds is not None}
    slowest, least = max(work, key=lambda rank: work[rank]), min(work.values())
    return slowest, work[slowest] / least if least else float("inf")


def profile(run: Run, records: Ranks, *, slowest_only: bool) -> Table:
    """Where the time of a step went: a row a variant and rank, or a variant's slowest rank alone."""
    rows = []
    for variant, of_ranks in profiles(records, run["world_size"]).items():
        most, ratio = slowest_rank(of_ranks)
        for rank, seconds in enumerate(of_ranks):
            if seconds is None or (slowest_only and rank != most):
                continue
            total_s = sum(seconds.values())
            cells = [share(seconds.get(kind, 0.0), total_s) for kind in CLASSES]
            if variant in run["by_torch"]:  # which sends and waits inside of its own passes
                cells = [
                    UNSEEN if kind in INSIDE and cell == NOTHING else cell
                    for kind, cell in zip(CLASSES, cells, strict=True)
                ]
            remark = f"{ratio:.2f} ×" if rank == most and len(of_ranks) > 1 else ""
            rows.append([variant, f"rank {rank}", milliseconds(total_s), *cells, remark])
    columns = [
        Column("ms a step (per cent) on"),
        Column("the slowest" if slowest_only else "rank", "value"),
        Column("ms", "number", in_log=False),
        *(Column(kind, "number") for kind in CLASSES),
        Column("slowest", "value", in_log=False),
    ]
    return Table(columns, rows)


def ranks(run: Run, kind: Kind) -> list[Column]:
    """A column a rank."""
    return [Column(f"rank {rank}", kind) for rank in range(run["world_size"])]


def verdict(claims: Iterable[Run]) -> str:
    """One word for several claims; "informational" where none of them decides."""
    claims = list(claims)
    if not all(claim["passed"] for claim in claims):
        return "FAILED"
    if not claims:
        return ""
    return "passed" if any(claim.get("decides", True) for claim in claims) else "informational"


def faults(run: Run) -> Table:
    """A row a fault of LAB_FAULTS."""
    word = {True: "passed", False: "FAILED", None: "informational"}
    rows = [[each["event"], each["should"], each["did"], Verdict(word[each["held"]])] for each in run["drills"]]
    return Table([Column("fault"), Column("expected"), Column("observed"), Column("")], rows)


# The staircase of a pipeline as text: a row a rank, a column a 64th of the step, for whoever reads only the log.
#
#     timeline   1f1b: bubble 0.27 measured, 0.27 by (p-1)/(m+p-1)
#                rank 0 |000111222333aaaaaa...|
#
# A column shows what took most of it. Inside a span that holds others, the inner one counts.

COLUMNS = 64
FINE = 8  # samples a column
IDLE = "."
LEGEND = (
    "0-9 forward of that microbatch, a-z its backward, A-Z its weights apart, - communication, + optimizer, . waits"
)


def staircases(run: Run, records: Ranks) -> Iterator[str]:
    """The chart of each variant whose bubble was compared, without the log's first column; a legend at the end."""
    drawn = False
    for variant, of_ranks in timelines(records, run["world_size"]).items():
        if claim := bubble_of(run, variant):
            formula = claim["formula"] or "the formula"
            yield f"{variant}: bubble {claim['measured']:.2f} measured, {claim['predicted']:.2f} by {formula}"
            yield from rows(of_ranks)
            drawn = True
    if drawn:
        yield LEGEND


def rows(of_ranks: Sequence[Sequence[Span]], columns: int = COLUMNS) -> list[str]:
    """A row a rank, from the first start to the last end of all."""
    step_s = step_seconds(of_ranks)
    return [f"rank {rank} |{row(spans, step_s, columns)}|" for rank, spans in enumerate(of_ranks)]


def row(spans: Sequence[Span], step_s: float, columns: int) -> str:
    """One rank's step of `step_s` seconds; outer spans come before those inside them, which paint over them."""
    fine = [IDLE] * (columns * FINE)
    for span in spans:
        first, last = (round(time_s / step_s * len(fine)) for time_s in (span.start_s, span.end_s))
        fine[first:last] = sign(span) * (last - first)
    cells = [fine[start : start + FINE] for start in range(0, len(fine), FINE)]
    return "".join(Counter(cell).most_common(1)[0][0] for cell in cells)


def sign(span: Span) -> str:
    """One letter for a span: a digit for a forward, a letter for a backward of the same microbatch, a large one for its
    weights where they come apart."""
    number = int(span.label) if span.label.isdecimal() else 0
    if span.kind == "forward":
        return str(number % 10)
    if span.kind in ("backward", "input", "weight"):
        return chr(ord("A" if span.kind == "weight" else "a") + number % 26)
    return {"optimizer": "+", "receive": IDLE, "wait": IDLE, "data": IDLE}.get(span.kind, "-")
