"""The end of rank 0's log: what was proven, what was measured beside what was predicted, the verdict, how to repeat it.

A person reads this and often nothing else. Every line begins with one of a few words in the first eleven columns, and
the last line alone says all that a script needs: the verdict, the report's path and the command that repeats the run.
"""

import shlex
from collections.abc import Container, Iterable
from pathlib import Path

from workers.report.claims import Run
from workers.report.holdings import COMPARISONS, REST, holdings
from workers.report.judge import first, pytorch_own, slowest
from workers.report.records import Ranks
from workers.report.spans import CLASSES, hidden, profiles, slowest_rank
from workers.report.staircase import staircases
from workers.report.units import difference, human_bytes, milliseconds, quantity, share

PROOF = ("gradients", "weights", "losses")
TRAFFIC = ("wire bytes", "called bytes")


def verdict_lines(run: Run, records: Ranks, report: Path | None) -> list[str]:
    """All lines, in the order in which one learns; `report` is the page's path, None where none was written."""
    blocks = [
        *_proof(run),
        *_measured(run, records),
        *_memory(run, records),
        *(_line("FAILED", failure_sentence(claim)) for claim in failures(run)),
        *_more_checks(run),
        *_compared(run),
        *_profile(run, records),
        *_hidden(run, records),
        *(_line("" if number else "timeline", line) for number, line in enumerate(staircases(run, records))),
        *(_line("skipped", f"{skip['variant']}: {skip['reason']}") for skip in run["skipped"]),
        *(_line("error", sentence) for sentence in error_sentences(run)),
        *(_line("lost", lost_sentence(lost)) for lost in run["lost"]),
    ]
    where = f"report {report}" if report else "no report written"
    return [*blocks, _line(run["verdict"].upper(), f"{headline(run)} · {where} · repeat {repeat_command(records)}")]


def headline(run: Run) -> str:
    """The verdict in one phrase: what held, or by name what did not."""
    if run["verdict"] in ("lost", "refused"):
        return "; ".join([lost_sentence(lost) for lost in run["lost"]] or [error["error"] for error in run["errors"]])
    failed, deciding = failures(run), [c for c in run["checks"] + run["comparisons"] if c.get("decides", True)]
    if failed:
        names = ", ".join(claim_name(claim) for claim in failed[:4]) + (", ..." if len(failed) > 4 else "")
        return f"{len(failed)} of {len(deciding)} checks failed: {names}"
    if run["errors"]:
        return str(run["errors"][0]["error"])
    held = f"{len(deciding)} checks held" if len(deciding) != 1 else "1 check held"
    held += "".join(f" · without rank {lost['rank']}" for lost in run["lost"])  # it left, and the others went on
    return held if run["proven"] else f"not proven · {held}"


def failures(run: Run) -> list[Run]:
    """The checks and comparisons that did not hold."""
    return [claim for claim in run["checks"] + run["comparisons"] if not claim["passed"]]


def failure_sentence(claim: Run) -> str:
    """What was expected and what was seen."""
    if "max_abs_diff" in claim:
        seen = f"differs by {difference(claim['max_abs_diff'])} where {claim['tolerance']:g} is allowed"
        return f"{claim_name(claim)}: {seen}" + (f" ({claim['detail']})" if claim["detail"] else "")
    predicted, allowed = quantity(claim["predicted"], claim["unit"]), quantity(claim["tolerance"], claim["unit"])
    measured = quantity(claim["measured"], claim["unit"])
    return f"{claim_name(claim)}: predicted {predicted} ± {allowed}, rank {claim['rank']} measured {measured}"


def claim_name(claim: Run) -> str:
    """The variant and the check, such as "bucketed gradients"."""
    return f"{claim['variant']} {claim['name']}".strip()


def lost_sentence(lost: Run) -> str:
    """Who is gone, since when and why."""
    step = "" if lost["step"] is None else f" at step {lost['step']}"
    return f"rank {lost['rank']} lost{step}: {lost['reason']}"


def error_sentences(run: Run) -> list[str]:
    """What ended ranks, a line for all that ended alike."""
    alike: dict[tuple[int, str], list[str]] = {}
    for error in run["errors"]:
        alike.setdefault((error["exit_code"], error["error"]), []).append(str(error["rank"]))
    return [
        f"rank {', '.join(ranks)} ended with code {exit_code}: {error}" for (exit_code, error), ranks in alike.items()
    ]


def repeat_command(records: Ranks) -> str:
    """The command that runs the same again."""
    repeat = first(records).repeat
    shaped = repeat.keys() & {"LAB_NET_RATE", "LAB_NET_DELAY"}
    overlay = ["-f", "docker-compose.yaml", "-f", "compose/net.yaml"] if shaped else []
    settings = [f"{name}={shlex.quote(value)}" for name, value in repeat.items()]
    return " ".join([*settings, "docker", "compose", *overlay, "up"])


def proof_note(run: Run) -> str:
    """Why a run that did not fail is still not proven; empty where it is."""
    if run["proven"] or run["verdict"] != "pass":
        return ""
    return "not proven: no check was made" if not run["checks"] else "not proven: LAB_PROOF=0 left the proof out"


def _proof(run: Run) -> list[str]:
    """A row a variant: its largest differences from one process."""
    proven: dict[str, dict[str, Run]] = {}
    for check in run["checks"]:
        if check["name"] in PROOF:
            proven.setdefault(check["variant"], {})[check["name"]] = check
    if not proven:
        return [_line("proof", proof_note(run))] if proof_note(run) else []
    tolerances = sorted({check["tolerance"] for row in proven.values() for check in row.values()})
    allowed = " to ".join(f"{tolerance:g}" for tolerance in (tolerances[0], tolerances[-1])[: len(tolerances)])
    rows = [
        [
            name or "all",
            *(difference(row[kind]["max_abs_diff"]) if kind in row else "-" for kind in PROOF),
            _held(row.values()),
        ]
        for name, row in proven.items()
    ]
    return _block("proof", ["float64, against one process", *PROOF, f"(tolerance {allowed})"], rows)


def _measured(run: Run, records: Ranks) -> list[str]:
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
        traffic = [human_bytes(max((c["predicted"] for c in claims), default=None))]
        traffic += [human_bytes(slowest(variant[kind])) for kind in ("called_bytes", "wire_bytes")]
        rows.append([variant["name"], milliseconds(seconds), *([ratio] if own else []), *traffic, _held(claims)])
    config = first(records).config
    columns = [
        f"{config.get('LAB_STEPS')} steps in {config.get('LAB_DTYPE')}",
        "ms a step",
        *([f"x {own}"] if own else []),
        "predicted",
        "called",
        "wire",
        "",
    ]
    return _block("measured", columns, rows, numbers=range(1, len(columns) - 1))


def _memory(run: Run, records: Ranks) -> list[str]:
    """A row a variant: what its fullest rank held, by class and as the process and the container count it."""
    columns, rows = holdings(run, records)
    claims = {c["variant"]: c for c in run["comparisons"] if c["name"] == REST}
    rows = [[*row, _held([claims[row[0]]] if row[0] in claims else [])] for row in rows]
    return _block("memory", [*columns, ""], rows, numbers=range(1, len(columns)))


def _more_checks(run: Run) -> list[str]:
    """The checks that held and that the table of the proof does not show, a line each."""
    rows = [
        [claim_name(check), difference(check["max_abs_diff"]), f"tolerance {check['tolerance']:g}", "held"]
        for check in run["checks"]
        if check["passed"] and check["name"] not in PROOF
    ]
    return _block("checks", None, rows)


def _compared(run: Run) -> list[str]:
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
        if claim["passed"] and not (claim["name"] in (*TRAFFIC, *COMPARISONS) and claim["variant"] in timed)
    ]
    return _block("compared", None, rows)


def _profile(run: Run, records: Ranks) -> list[str]:
    """A row a variant: where the time of its slowest rank went."""
    rows = []
    for variant, of_ranks in profiles(records, run["world_size"]).items():
        rank, _ = slowest_rank(of_ranks)
        seconds = of_ranks[rank] or {}
        cells = [share(seconds.get(kind, 0.0), sum(seconds.values())) for kind in CLASSES]
        rows.append([variant, f"rank {rank}", *cells])
    columns = ["ms a step (per cent) on", "the slowest", *CLASSES]
    return _block("profile", columns, rows, numbers=range(2, len(columns)))


def _hidden(run: Run, records: Ranks) -> list[str]:
    """A row a variant: the share of each rank's communication that its backward pass hid, seen by the profiler."""
    rows = [[variant, *cells] for variant, cells in hidden(records, run["world_size"]).items()]
    columns = ["communication behind the backward pass", *(f"rank {rank}" for rank in range(run["world_size"]))]
    return _block("hidden", columns, rows)


def _held(claims: Iterable[Run]) -> str:
    """One word for several claims; "shown" where none of them decides."""
    claims = list(claims)
    if not all(claim["passed"] for claim in claims):
        return "FAILED"
    if not claims:
        return ""
    return "held" if any(claim.get("decides", True) for claim in claims) else "shown"


def _block(word: str, columns: list[str] | None, rows: list[list[str]], numbers: Container[int] = ()) -> list[str]:
    """Rows in aligned columns under a first line that begins with `word`; columns in `numbers` go to the right."""
    if not rows:
        return []
    table = ([columns] if columns else []) + rows
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]))]
    lines = [
        "   ".join(
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return [_line(word if number == 0 else "", line) for number, line in enumerate(lines)]


def _line(word: str, text: str) -> str:
    return f"{word:<10} {text}".rstrip()
