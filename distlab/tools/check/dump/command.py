"""The command: read, judge, print like a live check, and write a script that hangs in the same way."""

import gc
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distlab.lab.cluster import name_ranks
from distlab.lab.report.sentences import WHEN_FAILED
from distlab.lab.report.table import wrapped
from distlab.tools.check.dump import repro
from distlab.tools.check.dump.reading import Unreadable
from distlab.tools.check.dump.verdict import Verdict, judge
from distlab.tools.check.judge.rank_state import HANG, MATCH
from distlab.tools.check.judge.report import where_lines

MOST_FAULTS = 8  # file errors in the log
MOST_ROWS = 24


def diagnose(places: Sequence[Path], script: Path, late_after_s: float, *, as_json: bool) -> int:
    """Print the verdict on the dumps in these folders and files; return the exit code."""
    gc.disable()  # a million calls without a cycle: the collector took half of the time
    try:
        verdict = judge(places, late_after_s)
    except Unreadable as error:
        print("\n".join(wrapped("refused", str(error))))
        return 2
    finally:
        gc.enable()
    text = repro.script_of(verdict, script.name)
    if text and script.exists() and not script.read_text(errors="replace").startswith(repro.MARK):
        verdict.faults.append(
            f"{script} is your own file and is not overwritten: choose another name with --repro FILE"
        )
        text = ""
    if text:
        script.write_text(text)
    if as_json:
        print(json.dumps(as_dict(verdict, script if text else None), indent=2))
    else:
        for line in lines_of(verdict, " ".join(map(str, places)), script if text else None):
            print(line)
    return verdict.exit_code


def lines_of(verdict: Verdict, what: str, script: Path | None) -> Iterator[str]:
    """Yield the lines of the verdict, in the form of a live check."""
    yield from wrapped("dump", f"{what} · {verdict.what}")
    for fault in verdict.faults[:MOST_FAULTS]:
        yield from wrapped("left out", fault)
    if len(verdict.faults) > MOST_FAULTS:
        yield from wrapped("left out", f"{len(verdict.faults) - MOST_FAULTS} more files")
    for finding in verdict.findings:
        yield from where_lines(merged(finding.rows))
    for finding in verdict.findings:
        yield from wrapped("FAILED", f"{WHEN_FAILED[finding.check]}: {finding.sentence}")
    if verdict.waiting:
        yield from where_lines(merged(verdict.rows))
        yield from wrapped("waits" if verdict.is_late else "no hang", verdict.waiting)
    yield from wrapped("ruled out", "; ".join(filter(None, verdict.ruled_out)) or "nothing")
    yield from wrapped("unknown", "; ".join(verdict.unknown))
    if verdict.findings:
        names = dict.fromkeys(WHEN_FAILED[finding.check] for finding in verdict.findings)
        yield from wrapped("FAIL", ", ".join(names))
    elif verdict.is_late:
        yield from wrapped("UNKNOWN", "these files do not show whether the wait ever ends")
    else:
        yield from wrapped("PASS", "nothing hangs: no call waits for a rank that never comes")
    if script is not None:
        yield from wrapped("repro", "the same calls on a few gloo ranks, which hang in the same way:")
        yield f"           WORLD_SIZE={len(repro.relevant_ranks(verdict))} distlab check {shlex.quote(str(script))}"


def merged(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Merge rows that are equal except for the rank."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for who, *rest in rows:
        ranks.setdefault(tuple(rest), []).append(int(who.removeprefix("rank ")))
    return [[name_ranks(which), *rest] for rest, which in ranks.items()][:MOST_ROWS]


def as_dict(verdict: Verdict, script: Path | None) -> dict[str, Any]:
    """Return the verdict for tools."""
    checks = {finding.check for finding in verdict.findings}
    return {
        "exit_code": verdict.exit_code, "dumps": verdict.what, "ranks": len(verdict.job.states),
        "ranks_with_a_dump": sorted(verdict.job.groups_of), "left_out": verdict.faults,
        "hangs": HANG in checks, "calls_match": MATCH not in checks,
        "findings": [
            {"check": each.check, "sentence": each.sentence, "ranks": list(each.ranks),
             "where": [dict(zip(("rank", "line", "call", "for", "code"), row, strict=True)) for row in each.rows]}
            for each in verdict.findings
        ],
        "waiting": verdict.waiting, "waiting_is_late": verdict.is_late,
        "ruled_out": list(filter(None, verdict.ruled_out)), "unknown": verdict.unknown,
        "repro": str(script) if script is not None else None,
    }  # fmt: skip
