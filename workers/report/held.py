"""What held and what did not, as sections of a page: the proof, the other checks, drills, predicted beside
measured."""

from typing import Any

from workers.report.blocks import PROOF
from workers.report.claims import Run
from workers.report.markup import Markup, chip, folded, section, table, text
from workers.report.units import allowed, difference, quantity


def checks(run: Run) -> Markup:
    """The proof as a row a variant, then every other check as a row."""
    proven = list(dict.fromkeys(check["variant"] for check in run["checks"] if check["name"] in PROOF))
    proof = [_proof_row(name, run) for name in proven]
    rest = {passed: [_row(check) for check in run["checks"] if check["name"] not in PROOF and check["passed"] == passed]
            for passed in (False, True)}  # fmt: skip
    columns = ["", "variant", "check", "largest difference", "allowed", ""]
    number = len(rest[True])
    return section(
        "Checks",
        table(["", "variant", *PROOF, "allowed"], proof, numbers=(2, 3, 4, 5)),
        table(columns, rest[False], numbers=(3, 4)),
        folded(f"{number} more check{'s' * (number != 1)} that held", table(columns, rest[True], numbers=(3, 4))),
        note=_note([check for check in run["checks"] if check["name"] in PROOF]),
    )


def _row(check: Run) -> list[Any]:
    """A check that is none of the proof's."""
    seen, detail = difference(check["max_abs_diff"]), check["detail"]
    return [verdict_chip(check), check["variant"] or "all", check["name"], seen, allowed(check), detail]


def _note(proof: list[Run]) -> str:
    """What the proof's numbers are."""
    if not proof:
        return ""
    units = {bool(check["unit"]) for check in proof}
    plain = ", in float64" if units == {False} else ", in float64 where no unit is named" if units != {True} else ""
    return f"The largest difference from one process that sees the whole batch{plain}, after a few steps."


def _proof_row(variant: str, run: Run) -> list[Any]:
    found = {check["name"]: check for check in run["checks"] if check["variant"] == variant and check["name"] in PROOF}
    cells = [difference(found[name]["max_abs_diff"]) if name in found else "" for name in PROOF]
    marked = [
        Markup(f'<b class="bad">{text(cell)}</b>') if name in found and not found[name]["passed"] else cell
        for name, cell in zip(PROOF, cells, strict=True)
    ]
    worst = min(found.values(), key=lambda check: check["passed"])
    bounds = sorted({allowed(check) for check in found.values()})
    return [verdict_chip(worst), variant or "all", *marked, ", ".join(bounds)]


def verdict_chip(claim: Run) -> Markup:
    """Held, failed, or only shown."""
    return chip("FAILED" if not claim["passed"] else "held" if claim.get("decides", True) else "shown")


def drills(run: Run) -> Markup:
    """Every fault that was planned: what should have come of it, and what did."""
    words = {True: chip("held"), False: chip("FAILED"), None: chip("nothing to hold")}
    rows = [
        [words[each["held"]], ": ".join(filter(None, (each["event"], each["detail"]))), each["should"], each["did"]]
        for each in run.get("drills", [])
    ]
    note = "Faults on purpose, by LAB_FAULTS. One that did not come is no fault where the run had ended before."
    return section("Drills", table(["", "fault", "what should come of it", "what did"], rows), note=note)


def comparisons(run: Run) -> Markup:
    """Every prediction beside what was measured, a row each; failed ones first, the others folded."""
    rows = {passed: [_compared(entry) for entry in run["comparisons"] if entry["passed"] == passed]
            for passed in (False, True)}  # fmt: skip
    columns = ["", "variant", "what", "predicted", "measured", "on rank", "allowed ±", "formula"]
    note = "Measured on the rank that is farthest from its prediction. What is only shown decides nothing."
    numbers, count = (3, 4, 5, 6), len(rows[True])
    return section(
        "Predicted and measured",
        table(columns, rows[False], numbers),
        folded(f"{count} comparison{'s' * (count != 1)} that held or are shown", table(columns, rows[True], numbers)),
        note=note,
    )


def _compared(entry: Run) -> list[Any]:
    """One prediction."""
    return [
        verdict_chip(entry),
        entry["variant"] or "all",
        entry["name"],
        quantity(entry["predicted"], entry["unit"]),
        quantity(entry["measured"], entry["unit"]),
        entry["rank"],
        quantity(entry["tolerance"], entry["unit"]) if entry["decides"] else entry.get("shown", ""),
        entry["formula"],
    ]
