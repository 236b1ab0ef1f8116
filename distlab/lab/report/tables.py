"""The tables of a run, one function each: proof, measured and predicted values, memory, and time.

Both log and page use them; the log omits some columns.
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
# The checks of the timed steps, by name: distlab/lab/verify/audit.py.
TIMED = ("timed losses", "audited loss", "audited weights", "audited optimizer", "timed replicas", "timed steps")
DRAWN, ON_WIRE = "drawn bytes", "wire as drawn"  # shown with the report's timeline
REST = "rest bytes"  # in the memory table, the comparison with the formula
OUTSIDE = ("process", "container", "allocator")  # other counters, each at rest and, some, at the peak
MEMORY = (REST, *(f"{source}{moment} bytes" for source in OUTSIDE for moment in ("", " peak")))
MOST_PROFILES = 64  # rows, of variants and ranks: 14 variants on 8 ranks took 26 kB of the page


def proof(run: Run) -> Table:
    """Return one row per variant: its largest differences from the single-process reference.

    The heading is the first one's; rows with another dtype or tolerance say so.
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
    """Return the checks with these names, by variant and by name."""
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
    """Return the tolerances of differences that have a unit, or whose tolerance is not a `common` one."""
    own = [each for each in checks if each["unit"] or each["tolerance"] not in common]
    texts = (allowed(each) if each["unit"] else f"{each['tolerance']:g} in float64" for each in own)
    return list(dict.fromkeys(f"(tolerance {each})" for each in texts))


def timed(run: Run) -> Table:
    """Return one row per variant: the differences of its timed steps, each with its tolerance."""
    found = _by_variant(run["checks"], TIMED)
    kinds = [kind for kind in TIMED if any(kind in row for row in found.values())]
    rows = [
        [name, *(_with_tolerance(row[kind]) if kind in row else "-" for kind in kinds), Verdict(verdict(row.values()))]
        for name, row in found.items()
    ]
    proven = any(kind in TIMED[:4] for kind in kinds)
    heading = "difference / tolerance" if proven else "not compared with the reference: LAB_PROOF=0"
    return Table([Column(heading), *(Column(kind, "value") for kind in kinds), Column("")], rows)


def _with_tolerance(check: Run) -> str:
    """Return a difference with its tolerance, if it has one."""
    off = difference(check["max_abs_diff"])
    return f"{off} / {difference(check['tolerance'])}" if check["tolerance"] else off


def checks(claims: Iterable[Run]) -> Table:
    """Return one row per check, for checks outside the proof's table."""
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
            for each in claims
        ],
        titled=False,
    )  # fmt: skip


def comparisons(claims: Iterable[Run]) -> Table:
    """Return one row per comparison: predicted, and the measured value farthest from it."""
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
            for each in claims
        ],
        titled=False,
    )  # fmt: skip


def measured(run: Run, records: Ranks) -> Table:
    """Return one row per variant: time of its slowest rank, bytes of the rank that sends most."""
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
        Column("ms per step", "number"),
        *([Column(f"x {own}", "number")] if own else []),
        Column("CPU ms, all ranks", "number", in_log=False),
        *(Column(source, "number") for source in (f"{unit} predicted", "called", "wire")),
        Column(""),
    ]
    return Table(columns, rows)


class Plan(NamedTuple):
    """The planner's prediction of a run: seconds per step and peak bytes of the variants that it knows, and the source
    of its numbers, or the reason why there are none."""

    variants: dict[str, tuple[float, float]]
    sentences: list[str]


def planned(run: Run, plan: Plan) -> Table:
    """Return one row per variant known to the planner: predicted values, the slowest rank's step and the fullest's
    peak."""
    rows = []
    for variant in run["variants"]:
        step_s, by_rank = slowest(variant["step_seconds"]), variant["peak_by_class"]
        rank = fullest(by_rank)
        if variant["name"] not in plan.variants or not step_s or rank is None:
            continue
        planned_s, planned_bytes = plan.variants[variant["name"]]
        peak = sum(by_rank[rank].values())
        rows.append(
            [
                variant["name"], milliseconds(planned_s), milliseconds(step_s), _error(planned_s, step_s),
                human_bytes(planned_bytes), human_bytes(peak), _error(planned_bytes, peak),
            ]
        )  # fmt: skip
    columns = ("ms planned", "ms per step", "error", "peak planned", "peak", "error")
    return Table([Column("variant"), *(Column(title, "number") for title in columns)], rows)


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}" if measured else "-"


def _traffic(variant: Run, records: Ranks) -> list[float | None]:
    """Return the bytes of the rank that sends most: predicted, by calls and on the wire."""
    return [most_predicted(records, variant["name"]), *(slowest(variant[of]) for of in ("called_bytes", "wire_bytes"))]


def most_predicted(records: Ranks, variant: str) -> float | None:
    """Return the largest prediction of bytes per rank: each rank has its own formula."""
    claims = [each for _, each in select(records, Comparison) if each.variant == variant and each.name in TRAFFIC]
    return max((each.predicted for each in claims), default=None)


def _wide(claims: Iterable[Run]) -> str:
    """Return the tolerance of bytes if it exceeds a tenth of the prediction: each message has a header."""
    wide = [c["tolerance"] for c in claims if c["decides"] and c["tolerance"] > 0.1 * c["predicted"]]
    return f", ± {human_bytes(max(wide))}" if wide else ""


def memory(run: Run, records: Ranks) -> Table:
    """Return one row per variant: its fullest rank's bytes by class, and those of process and container.

    Cells are "at rest / at the peak", one number if they are equal; empty columns are dropped.
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


def fullest(by_rank: Iterable[dict[str, int] | None]) -> int | None:
    """Return the rank with the most bytes over all classes; None if no rank has any."""
    totals = {rank: sum(of_rank.values()) for rank, of_rank in enumerate(by_rank) if of_rank}
    return max(totals, key=lambda rank: totals[rank], default=None)


def _amounts(variant: Run, rank: int, records: Ranks) -> dict[str, list[float]]:
    """Return the bytes of one rank by column: at rest and at the peak, or only at rest."""
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


# Time of a step by class, and the slowest rank: the one with the most time in its own work. Communication time does not
# show it: a collective ends for all at once, so the ranks that wait for a slow one spend that time in the call, and a
# total with communication would be equal for all. (DDP waits unmarked inside its backward pass: there ranks look
# equal.)

CLASSES = ("data", "forward", "backward", "communication", "optimizer", "waiting")
INSIDE = ("communication", "waiting")
NOTHING = "-"  # no time at all
Profiles = list[dict[str, float] | None]  # seconds of a step by class, per rank


def profiles(records: Ranks, world_size: int) -> dict[str, Profiles]:
    """Return by variant the times of a step by class on each rank; None for ranks without records."""
    found: dict[str, Profiles] = {}
    for rank, profile in select(records, Profile):
        found.setdefault(profile.variant, [None] * world_size)[rank] = profile.seconds
    return found


def own_work(seconds: dict[str, float]) -> float:
    """Return the seconds of a step in which this rank waits for no other."""
    return sum(seconds.get(kind, 0.0) for kind in OWN_WORK)


def slowest_rank(of_ranks: Profiles) -> tuple[int, float]:
    """Return the rank with the most own work, and its ratio to the rank with the least (infinite if that is 0)."""
    work = {rank: own_work(seconds) for rank, seconds in enumerate(of_ranks) if seconds is not None}
    slowest, least = max(work, key=lambda rank: work[rank]), min(work.values())
    return slowest, work[slowest] / least if least else float("inf")


def profile(run: Run, records: Ranks, *, slowest_only: bool) -> Table:
    """Return a step's times by class: one row per variant and rank, or only the variant's slowest rank."""
    rows = []
    for variant, of_ranks in profiles(records, run["world_size"]).items():
        most, ratio = slowest_rank(of_ranks)
        for rank, seconds in enumerate(of_ranks):
            if seconds is None or (slowest_only and rank != most):
                continue
            total_s = sum(seconds.values())
            cells = [share(seconds.get(kind, 0.0), total_s) for kind in CLASSES]
            if variant in run["by_torch"]:  # PyTorch sends and waits inside its own passes
                cells = [
                    UNSEEN if kind in INSIDE and cell == NOTHING else cell
                    for kind, cell in zip(CLASSES, cells, strict=True)
                ]
            remark = f"{ratio:.2f} ×" if rank == most and len(of_ranks) > 1 else ""
            rows.append([variant, f"rank {rank}", milliseconds(total_s), *cells, remark])
    columns = [
        Column("ms per step (per cent) on"),
        Column("the slowest" if slowest_only else "rank", "value"),
        Column("ms", "number", in_log=False),
        *(Column(kind, "number") for kind in CLASSES),
        Column("slowest", "value", in_log=False),
    ]
    return Table(columns, rows)


def ranks(run: Run, kind: Kind) -> list[Column]:
    """Return one column per rank."""
    return [Column(f"rank {rank}", kind) for rank in range(run["world_size"])]


def verdict(claims: Iterable[Run]) -> str:
    """Return one word for several claims; "informational" if none of them decides."""
    claims = list(claims)
    if not all(claim["passed"] for claim in claims):
        return "FAILED"
    if not claims:
        return ""
    return "passed" if any(claim.get("decides", True) for claim in claims) else "informational"


def faults(run: Run) -> Table:
    """Return one row per fault of LAB_FAULTS."""
    word = {True: "passed", False: "FAILED", None: "informational"}
    rows = [[each["event"], each["should"], each["did"], Verdict(word[each["held"]])] for each in run["drills"]]
    return Table([Column("fault"), Column("expected"), Column("observed"), Column("")], rows)


# The schedule of a pipeline as text: one row per rank, one column per 64th of the step, for readers of the log.
#
#     timeline   1f1b: bubble 0.27 measured, 0.27 by (p-1)/(m+p-1)
#                rank 0 |000111222333aaaaaa...|
#
# A column shows what took most of it. Of nested spans the inner one counts.

COLUMNS = 64
FINE = 8  # samples per column
IDLE = "."
LEGEND = (
    "0-9 forward of that microbatch, a-z its backward, A-Z that of its weights, - communication, + optimizer, . waits"
)


def staircases(run: Run, records: Ranks) -> Iterator[str]:
    """Yield the chart of each variant with a compared bubble, without the log's first column; a legend at the end."""
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
    """Return one row per rank, from the first start to the last end of all."""
    step_s = step_seconds(of_ranks)
    return [f"rank {rank} |{row(spans, step_s, columns)}|" for rank, spans in enumerate(of_ranks)]


def row(spans: Sequence[Span], step_s: float, columns: int) -> str:
    """Return one rank's step of `step_s` seconds; outer spans come first, and inner ones are drawn over them."""
    fine = [IDLE] * (columns * FINE)
    for span in spans:
        first, last = (round(time_s / step_s * len(fine)) for time_s in (span.start_s, span.end_s))
        fine[first:last] = sign(span) * (last - first)
    cells = [fine[start : start + FINE] for start in range(0, len(fine), FINE)]
    return "".join(Counter(cell).most_common(1)[0][0] for cell in cells)


def sign(span: Span) -> str:
    """Return the letter of a span: a digit for a forward, a lower-case letter for a backward of the same microbatch, an
    upper-case one for a separate pass for its weights."""
    number = int(span.label) if span.label.isdecimal() else 0
    if span.kind == "forward":
        return str(number % 10)
    if span.kind in ("backward", "input", "weight"):
        return chr(ord("A" if span.kind == "weight" else "a") + number % 26)
    return {"optimizer": "+", "receive": IDLE, "wait": IDLE, "data": IDLE}.get(span.kind, "-")
