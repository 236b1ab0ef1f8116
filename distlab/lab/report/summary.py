"""The summary table of rank 0's log at LAB_LOG=normal, with one row per variant.

It fits into 80 columns with the prefix that Compose puts before each line.
"""

from distlab.lab.report import tables
from distlab.lab.report.records import Ranks, Run
from distlab.lab.report.table import WIDTH, Column, Table, middle_cut
from distlab.lab.report.units import byte_unit, difference, three_digits
from distlab.lab.report.verdict import proof_on, pytorch_own, slowest, times_steps

MOST_TITLE = 9  # columns

Values = dict[str, float | None]  # by variant


def table_lines(run: Run, records: Ranks) -> list[str]:
    """Return the table under two lines of titles, as wide as the terminal allows; nothing if it has only verdicts."""
    made = table(run, records)
    return made.text(WIDTH) if len(made.columns) > 2 else []


def table(run: Run, records: Ranks) -> Table:
    """Return one row per variant; empty columns are dropped, missing values are empty cells."""
    names, own = variants(run), pytorch_own(run)
    of = {each["name"]: each for each in run["variants"]}
    seconds = {name: slowest(each["step_seconds"]) for name, each in of.items()}
    predicted, sent = traffic(run, records)
    peak = {name: peak_bytes(each) for name, each in of.items()}
    scale, unit = byte_unit(max(filter(None, (*predicted.values(), *sent.values(), *peak.values())), default=0))
    columns: list[tuple[str, dict[str, str]]] = [
        ("exact to", {name: exact(run, name) for name in names}), ("step\nms", scaled(seconds, 1e-3)),
    ]  # fmt: skip
    if own and (own_s := seconds[own]):
        ratios = {name: f"{step_s / own_s:.2f}" for name, step_s in seconds.items() if step_s is not None}
        columns.append((own_title(own), ratios))
    if run["world_size"] > 1:
        columns.append((f"{unit} sent\npredicted", scaled(predicted, scale)))
        columns.append((f"{'per step' if any(seconds.values()) else 'at most'}\nmeasured", scaled(sent, scale)))
    columns.append((f"peak\n{unit}", scaled(peak, scale)))
    columns = [(title, cells) for title, cells in columns if any(cells.values())]
    rows = [
        [name or run["run_mode"], *(cells.get(name, "") for _, cells in columns), judged(run, name)] for name in names
    ]
    verdicts = [Column("")] if any(row[-1] for row in rows) else []
    shown = [Column("variant"), *(Column(title, "number") for title, _ in columns), *verdicts]
    return Table(shown, [row[: len(shown)] for row in rows])


def own_title(own: str) -> str:
    """Return the title of the ratio to PyTorch's own variant, on two lines if its name is long."""
    prefix, _, name = own.rpartition("_")
    parts = (f"x {prefix}".rstrip(), name) if len(own) > len("fsdp2") else ("", f"x {own}")
    return "\n".join(middle_cut(part, MOST_TITLE) for part in parts if part)


def scaled(values: Values, scale: float) -> dict[str, str]:
    """Return the known values with three digits in that unit."""
    return {name: three_digits(value / scale) for name, value in values.items() if value is not None}


def variants(run: Run) -> list[str]:
    """Return the variants that ran, in order; only "" if the mode has none."""
    claims = (claim["variant"] for claim in run["checks"] + run["comparisons"])
    skipped = {skip["variant"] for skip in run["skipped"]}
    named = dict.fromkeys([*(each["name"] for each in run["variants"]), *claims])
    return [name for name in named if name and name not in skipped] or [""]


def claims_of(run: Run, variant: str) -> list[Run]:
    return [claim for claim in run["checks"] + run["comparisons"] if claim["variant"] == variant]


def exact(run: Run, variant: str) -> str:
    """Return the largest difference of a variant's proof, "-" if it was left out; without training, of all its
    checks."""
    found = [check for check in run["checks"] if check["variant"] == variant and variant]
    proof = [check for check in found if check["name"] in tables.PROOF]
    if not proof and (not proof_on(run["config"]) or times_steps(run)):
        return "-" if found else ""
    proof = proof or [check for check in found if not check["unit"]]
    if not proof:
        return ""
    worst = max(proof, key=lambda check: (not check["passed"], check["max_abs_diff"]))
    largest = worst["max_abs_diff"]
    return f"{largest:.2g} eps" if worst["unit"].startswith("epsilons") else difference(largest)


def judged(run: Run, variant: str) -> str:
    """Return one word for all checks of a variant."""
    return tables.verdict(claims_of(run, variant)).replace("informational", "shown")


def traffic(run: Run, records: Ranks) -> tuple[Values, Values]:
    """Return by variant the bytes of the rank that sends most: predicted, and on the wire or, if not measured, by
    calls. If a mode times calls instead of steps, those of the largest call."""
    predicted: Values = {name: tables.most_predicted(records, name) for name in variants(run)}
    seen = {each["name"]: [slowest(each[kind]) for kind in ("wire_bytes", "called_bytes")] for each in run["variants"]}
    sent = {name: next((value for value in values if value is not None), None) for name, values in seen.items()}
    for name in variants(run):
        if sent.get(name) is None:
            claims = [c for c in run["comparisons"] if c["variant"] == name and c["name"].startswith(tables.TRAFFIC)]
            most = max(claims, key=lambda claim: claim["predicted"], default=None)
            predicted[name], sent[name] = (most["predicted"], most["measured"]) if most else (predicted[name], None)
    return predicted, sent


def peak_bytes(variant: Run) -> float | None:
    """Return the peak bytes of the rank with the highest peak."""
    rank = tables.fullest(variant["peak_by_class"])
    return slowest(variant["peak_bytes"]) if rank is None else sum(variant["peak_by_class"][rank].values())
