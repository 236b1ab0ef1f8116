"""The tables of rank 0's log, a function a block: what was proven, measured beside predicted, and where time went.

Every line begins with one of a few words in the first eleven columns, or with as many blanks.
"""

from collections.abc import Container, Iterable, Sequence
from itertools import zip_longest

from workers.report import spans
from workers.report.claims import Run
from workers.report.holdings import COMPARISONS, REST, holdings
from workers.report.judge import first, pytorch_own, slowest
from workers.report.records import Comparison, Ranks, select
from workers.report.sentences import FINDINGS, claim_name, proof_note
from workers.report.units import allowed, difference, human_bytes, milliseconds, quantity, share

PROOF = ("gradients", "weights", "losses")
DIGITS = len("2.8e-17")  # as wide as a difference gets
TRAFFIC = ("wire bytes", "called bytes")
# What the timed steps are held to, by the names of their checks: passes/holding.py.
TIMED = ("timed losses", "audited loss", "audited weights", "audited optimizer", "timed replicas", "timed steps")


def skipped(run: Run) -> list[str]:
    """A line a variant that was left out."""
    return [line("skipped", f"{skip['variant']}: {skip['reason']}") for skip in run["skipped"]]


def proof(run: Run, names: Sequence[str] = ()) -> list[str]:
    """A row a variant: its largest differences from one process.

    `names` are all variants that will be proven: rows that are told one by one stand in line. The heading is that of
    the first one, and a row to which another type or tolerance applies says so.
    """
    proven: dict[str, dict[str, Run]] = {}
    for check in run["checks"]:
        if check["name"] in PROOF:
            proven.setdefault(check["variant"], {})[check["name"]] = check
    if not proven:
        return [line("proof", proof_note(run))] if proof_note(run) else []
    first_row = list(next(iter(proven.values())).values())
    common = [] if any(check["unit"] for check in first_row) else sorted({check["tolerance"] for check in first_row})
    rows = [
        [
            name or "all",
            *(difference(row[kind]["max_abs_diff"]) if kind in row else "-" for kind in PROOF),
            " ".join([_held(row.values()), *_own_tolerances(row.values(), common)]),
        ]
        for name, row in proven.items()
    ]
    span = " to ".join(f"{tolerance:g}" for tolerance in (*common[:1], *common[1:][-1:]))
    columns = [f"{'float64, ' if common else ''}against one process", *PROOF, f"(tolerance {span})" if common else ""]
    return _block("proof", columns, rows, least=[max(map(len, ("", *names))), *[DIGITS] * len(PROOF)])


def _own_tolerances(checks: Iterable[Run], common: Container[float]) -> list[str]:
    """What is allowed of differences that have a unit, or that are held to something else than is `common`."""
    own = [each for each in checks if each["unit"] or each["tolerance"] not in common]
    told = (allowed(each) if each["unit"] else f"{each['tolerance']:g} in float64" for each in own)
    return list(dict.fromkeys(f"(tolerance {each})" for each in told))


def measured(run: Run, records: Ranks) -> list[str]:
    """A row a variant: time of its slowest rank, bytes of the rank that sends most."""
    if not run["variants"]:
        return []
    own = pytorch_own(run)
    own_s = next((slowest(variant["step_seconds"]) for variant in run["variants"] if variant["name"] == own), None)
    rows = []
    for variant in run["variants"]:
        seconds = slowest(variant["step_seconds"])
        claims = [c for c in run["comparisons"] if c["variant"] == variant["name"] and c["name"] in TRAFFIC]
        ratio = f"{seconds / own_s:.2f}" if seconds and own_s else "-"
        traffic = [human_bytes(most_predicted(records, variant["name"]))]
        traffic += [human_bytes(slowest(variant[kind])) for kind in ("called_bytes", "wire_bytes")]
        rows.append(
            [variant["name"], milliseconds(seconds), *([ratio] if own else []), *traffic, _held(claims) + _wide(claims)]
        )
    config = first(records).config
    columns = [
        f"{config.get('LAB_STEPS')} steps, LAB_DTYPE={config.get('LAB_DTYPE')}",
        "ms a step",
        *([f"x {own}"] if own else []),
        "predicted",
        "called",
        "wire",
        "",
    ]
    return _block("measured", columns, rows, numbers=range(1, len(columns) - 1))


def most_predicted(records: Ranks, variant: str) -> float | None:
    """Of the bytes that a rank sends: each has its own formula."""
    claims = [each for _, each in select(records, Comparison) if each.variant == variant and each.name in TRAFFIC]
    return max((each.predicted for each in claims), default=None)


def memory(run: Run, records: Ranks) -> list[str]:
    """A row a variant: what its fullest rank held, by class and as the process and the container count it."""
    columns, rows = holdings(run, records)
    claims = {c["variant"]: c for c in run["comparisons"] if c["name"] == REST}
    rows = [[*row, _held([claims[row[0]]] if row[0] in claims else [])] for row in rows]
    return _block("memory", [*columns, ""], rows, numbers=range(1, len(columns)))


def more_checks(run: Run) -> list[str]:
    """The checks that held and that the table of the proof does not show, a line each."""
    rows = [
        [claim_name(check), difference(check["max_abs_diff"]), f"tolerance {allowed(check)}", "held"]
        for check in run["checks"]
        if check["passed"] and check["name"] not in (*PROOF, *TIMED) and check["unit"] != FINDINGS
    ]
    held = [check["name"] for check in run["checks"] if check["passed"] and check["unit"] == FINDINGS]
    return _block("checks", None, rows) + ([line("checks", f"held: {', '.join(held)}")] if held else [])


def timed(run: Run) -> list[str]:
    """A row a variant: what its timed steps are off, of what is allowed."""
    found: dict[str, dict[str, Run]] = {}
    for check in run["checks"]:
        if check["name"] in TIMED:
            found.setdefault(check["variant"], {})[check["name"]] = check
    kinds = [kind for kind in TIMED if any(kind in row for row in found.values())]
    rows = [
        [name, *(_of_allowed(row[kind]) if kind in row else "-" for kind in kinds), _held(row.values())]
        for name, row in found.items()
    ]
    proven = any(kind in TIMED[:4] for kind in kinds)
    heading = "off, of what rounding allows" if proven else "not held against one process: LAB_PROOF=0"
    return _block("timed", [heading, *kinds, ""], rows)


def _of_allowed(check: Run) -> str:
    """A difference beside its tolerance, where it has one."""
    off = difference(check["max_abs_diff"])
    return f"{off} of {difference(check['tolerance'])}" if check["tolerance"] else off


DRAWN, ON_WIRE = "drawn bytes", "wire as drawn"  # of the report's picture: it is there that they are told


def compared(run: Run) -> list[str]:
    """The comparisons that held or are only shown and that the table of the variants does not hold."""
    timed = {variant["name"] for variant in run["variants"]}
    rows = [
        [
            claim_name(claim),
            f"predicted {quantity(claim['predicted'], claim['unit'])}",
            f"measured {quantity(claim['measured'], claim['unit'])}",
            _held([claim]),
        ]
        for claim in run["comparisons"]
        if claim["passed"]
        and not (claim["name"] in (*TRAFFIC, DRAWN, ON_WIRE, *COMPARISONS) and claim["variant"] in timed)
    ]
    return _block("compared", None, rows)


def profile(run: Run, records: Ranks) -> list[str]:
    """A row a variant: where the time of its slowest rank went."""
    rows = []
    for variant, of_ranks in spans.profiles(records, run["world_size"]).items():
        rank, _ = spans.slowest_rank(of_ranks)
        seconds = of_ranks[rank] or {}
        cells = [share(seconds.get(kind, 0.0), sum(seconds.values())) for kind in spans.CLASSES]
        rows.append([variant, f"rank {rank}", *cells])
    columns = ["ms a step (per cent) on", "the slowest", *spans.CLASSES]
    return _block("profile", columns, rows, numbers=range(2, len(columns)))


def hidden(run: Run, records: Ranks) -> list[str]:
    """A row a variant: the share of each rank's communication that its backward pass hid, seen by the profiler."""
    rows = [[variant, *cells] for variant, cells in spans.hidden(records, run["world_size"]).items()]
    columns = ["communication behind the backward pass", *(f"rank {rank}" for rank in range(run["world_size"]))]
    return _block("hidden", columns, rows)


def _wide(claims: Iterable[Run]) -> str:
    """How far bytes may be off, where that is more than a tenth of what is predicted: each message has a header."""
    wide = [c["tolerance"] for c in claims if c["decides"] and c["tolerance"] > 0.1 * c["predicted"]]
    return f", ± {human_bytes(max(wide))}" if wide else ""


def _held(claims: Iterable[Run]) -> str:
    """One word for several claims; "shown" where none of them decides."""
    claims = list(claims)
    if not all(claim["passed"] for claim in claims):
        return "FAILED"
    if not claims:
        return ""
    return "held" if any(claim.get("decides", True) for claim in claims) else "shown"


def _block(
    word: str, columns: list[str] | None, rows: list[list[str]], numbers: Container[int] = (), least: Sequence[int] = ()
) -> list[str]:
    """Rows in aligned columns under a first line that begins with `word`; columns in `numbers` go to the right, and the
    first ones are at `least` so wide."""
    if not rows:
        return []
    table = ([columns] if columns else []) + rows
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]))]
    widths = [max(pair) for pair in zip_longest(widths, least, fillvalue=0)]
    lines = [
        "   ".join(
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return [line(word if number == 0 else "", text) for number, text in enumerate(lines)]


def line(word: str, text: str) -> str:
    """A line of the log under its word."""
    return f"{word:<10} {text}".rstrip()
