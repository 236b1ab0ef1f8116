"""Rank 0's log: the proof, measured against predicted, the verdict, and the command to repeat the run.

Most readers see only this. Every line begins with one of a few words in the first eleven columns, and the last line has
all that a script needs: the verdict, the report's path and the command that reruns it.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from distlab.lab.report import sentences, summary, tables
from distlab.lab.report.records import Ranks, Run
from distlab.lab.report.run_folder import Level
from distlab.lab.report.table import in_lines, log_line, wrapped
from distlab.lab.report.tables import staircases
from distlab.lab.report.verdict import PROOF, SCRIPT

DIGITS = len("2.8e-17")  # as wide as a difference gets


def proof(run: Run, names: Sequence[str] = ()) -> list[str]:
    """Return the proof row by row; `names` are all variants that will be proven, so that rows printed one by one are
    aligned."""
    least = [max(map(len, ("", *names))), *[DIGITS] * len(tables.PROOF)]
    note = sentences.proof_note(run)
    return tables.proof(run).under("proof", least) or ([log_line("proof", note)] if note else [])


# Lines printed during the run as soon as they are known, in this order; the proof row by row.
SECTIONS: dict[str, Callable[[Run, Ranks, Sequence[str]], list[str]]] = {
    "skipped": lambda run, _records, _rows: in_lines(sentences.skipped(run, by_name=0)),
    "proof": lambda run, _records, rows: proof(run, rows),
    "timed": lambda run, _records, _rows: tables.timed(run).under("timed"),
    "profile": lambda run, records, _rows: tables.profile(run, records, slowest_only=True).under("profile"),
    "measured": lambda run, records, _rows: tables.measured(run, records).under("measured"),
    "memory": lambda run, records, _rows: tables.memory(run, records).under("memory"),
}


def mistake(run: Run) -> list[str]:
    """Return the first line of a run with an injected bug: its name."""
    return wrapped("bug", sentences.mistake_sentence(run)) if run["mistake"] else []


def end_lines(
    run: Run, records: Ranks, report: Path | None, level: Level, printed: Collection[str] = ()
) -> list[str]:  # fmt: skip
    """Return rank 0's last lines, by LAB_LOG; a user's script or model has only one form."""
    if level == "full" or (level == "normal" and run["run_mode"] in (SCRIPT, PROOF)):
        return verdict_lines(run, records, report, printed)
    failed = [*sentences.failed(run), *sentences.troubles(run)]
    if level == "quiet":
        return in_lines([*failed, *sentences.ending(run, records, report)])
    parts = [
        *sentences.single_rank(run), *sentences.times(run), *sentences.deciding_checks(run), *sentences.skipped(run),
        *sentences.first_failures(run), *sentences.troubles(run), *sentences.error_logs(run, report),
        *sentences.ending(run, records, report),
    ]  # fmt: skip
    return [*summary.table_lines(run, records), *in_lines(parts)]


def verdict_lines(run: Run, records: Ranks, report: Path | None, printed: Collection[str] = ()) -> list[str]:
    """Return all lines in order, without those `printed` during the run.

    `report` is the page's path, None if none was written.
    """
    single_rank = [] if run["run_mode"] in (SCRIPT, PROOF) else sentences.single_rank(run)
    ends = [*sentences.troubles(run), *single_rank, *sentences.times(run), *sentences.ending(run, records, report)]
    return [
        *rows_not_yet_printed(mistake(run), printed),
        *(each for section in SECTIONS.values() for each in rows_not_yet_printed(section(run, records, ()), printed)),
        *in_lines(sentences.failed(run)),
        *more_checks(run),
        *compared(run),
        *(log_line("" if number else "timeline", text) for number, text in enumerate(staircases(run, records))),
        *in_lines(ends),
    ]


def more_checks(run: Run) -> list[str]:
    """Return the checks that passed and are in no table above."""
    others = [
        check for check in run["checks"] if check["passed"] and check["name"] not in (*tables.PROOF, *tables.TIMED)
    ]
    lines = tables.checks(check for check in others if check["unit"] != sentences.FINDINGS).under("checks")
    early = "passed until the run was ended"
    names: dict[str, list[str]] = {"passed": [], early: []}
    for check in others:
        if check["unit"] == sentences.FINDINGS:
            names[early if check["detail"] == sentences.UNTIL_ENDED else "passed"].append(check["name"])
    return lines + [
        line for word, found in names.items() if found for line in wrapped("checks", f"{word}: {', '.join(found)}")
    ]


def compared(run: Run) -> list[str]:
    """Return the comparisons that passed or are informational and are in no table above."""
    timed = {variant["name"] for variant in run["variants"]}
    in_tables = (*tables.TRAFFIC, tables.DRAWN, tables.ON_WIRE, *tables.MEMORY)
    left = (c for c in run["comparisons"] if c["passed"] and not (c["name"] in in_tables and c["variant"] in timed))
    return tables.comparisons(left).under("compared")


def rows_not_yet_printed(block: list[str], printed: Collection[str]) -> list[str]:
    """Return a block's rows that were not printed yet, each under its heading, which may have been; nothing if all
    were."""
    left: list[str] = []
    heading = ""
    for row in block:
        heading = heading if row.startswith(" ") else row
        if words_of_row(row) not in printed:
            left += [row] if heading in (row, *left) else [heading, row]
    return left


def words_of_row(row: str) -> str:
    """Return a row without its column widths, which grow with later rows."""
    return " ".join(row.split())
