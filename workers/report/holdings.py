"""What variants hold in memory, as the rows of one table: a variant's fullest rank, by class and as others count it."""

from collections.abc import Iterable, Sequence

from workers.report.claims import Run
from workers.report.records import Comparison, Ranks, select
from workers.report.units import byte_unit, three_digits

REST = "rest bytes"  # the comparison with the formula
OUTSIDE = ("process", "container", "allocator")  # who else counts, each at rest and, some, at the peak
COMPARISONS = (REST, *(f"{source}{moment} bytes" for source in OUTSIDE for moment in ("", " peak")))


def fullest(held: Iterable[dict[str, int] | None]) -> int | None:
    """The rank that holds most, of all ranks' bytes by class; None where no rank wrote any."""
    totals = {rank: sum(of_rank.values()) for rank, of_rank in enumerate(held) if of_rank}
    return max(totals, key=lambda rank: totals[rank], default=None)


def holdings(run: Run, records: Ranks) -> tuple[list[str], list[list[str]]]:
    """Columns and a row a variant: "at rest / at the peak", one number where they are the same; no column that is
    empty."""
    amounts: dict[str, dict[str, list[float]]] = {}
    for variant in run["variants"]:
        rank = fullest(variant["peak_by_class"])
        if rank is not None:
            amounts[variant["name"]] = _amounts(variant, rank, records)
    if not amounts:
        return [], []
    scale, unit = byte_unit(max(max(row["total"]) for row in amounts.values()))
    kinds = dict.fromkeys(kind for row in amounts.values() for kind in row)
    filled = [kind for kind in kinds if any(any(row.get(kind, [])) for row in amounts.values())]
    rows = [[name, *(_cell(row.get(kind, []), scale) for kind in filled)] for name, row in amounts.items()]
    return [f"{unit} at rest / at the peak", *filled], rows


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


def _cell(values: Sequence[float], scale: float) -> str:
    numbers = [three_digits(value / scale) for value in values]
    return " / ".join(dict.fromkeys(numbers)) or "-"
