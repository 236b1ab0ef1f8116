"""Rank 0's log: what was proven, what was measured beside what was predicted, the verdict, how to repeat it.

A person reads this and often nothing else. Every line begins with one of a few words in the first eleven columns, and
the last line alone says all that a script needs: the verdict, the report's path and the command that reruns it.
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
    """The proof, row by row: `names` are all variants that will be proven, so that those that are told one by one stand
    in line."""
    least = [max(map(len, ("", *names))), *[DIGITS] * len(tables.PROOF)]
    note = sentences.proof_note(run)
    return tables.proof(run).under("proof", least) or ([log_line("proof", note)] if note else [])


# What is told as soon as it is known, while the run goes on, in the order in which one learns it; the proof row by row.
SECTIONS: dict[str, Callable[[Run, Ranks, Sequence[str]], list[str]]] = {
    "skipped": lambda run, _records, _rows: in_lines(sentences.skipped(run, by_name=0)),
    "proof": lambda run, _records, rows: proof(run, rows),
    "timed": lambda run, _records, _rows: tables.timed(run).under("timed"),
    "profile": lambda run, records, _rows: tables.profile(run, records, slowest_only=True).under("profile"),
    "measured": lambda run, records, _rows: tables.measured(run, records).under("measured"),
    "memory": lambda run, records, _rows: tables.memory(run, records).under("memory"),
}


def mistake(run: Run) -> list[str]:
    """The first line of a run with an injected bug: which one, by name."""
    return wrapped("bug", sentences.mistake_sentence(run)) if run["mistake"] else []


def end_lines(
    run: Run, records: Ranks, report: Path | None, level: Level, told: Collection[str] = ()
) -> list[str]:  # fmt: skip
    """What rank 0 says at the end, by LAB_LOG; of someone's own script or model there is no shorter way to say it."""
    if level == "full" or (level == "normal" and run["run_mode"] in (SCRIPT, PROOF)):
        return verdict_lines(run, records, report, told)
    failed = [*sentences.failed(run), *sentences.troubles(run)]
    if level == "quiet":
        return in_lines([*failed, *sentences.ending(run, records, report)])
    parts = [
        *sentences.alone(run), *sentences.times(run), *sentences.decided(run), *sentences.skipped(run),
        *sentences.first_failures(run), *sentences.troubles(run), *sentences.where_ended(run, report),
        *sentences.ending(run, records, report),
    ]  # fmt: skip
    return [*summary.table_lines(run, records), *in_lines(parts)]


def verdict_lines(run: Run, records: Ranks, report: Path | None, told: Collection[str] = ()) -> list[str]:
    """All lines, in the order in which one learns, but for those that were `told` while the run went on.

    `report` is the page's path, None where none was written.
    """
    alone = [] if run["run_mode"] in (SCRIPT, PROOF) else sentences.alone(run)
    ends = [*sentences.troubles(run), *alone, *sentences.times(run), *sentences.ending(run, records, report)]
    return [
        *rows_not_yet_printed(mistake(run), told),
        *(each for section in SECTIONS.values() for each in rows_not_yet_printed(section(run, records, ()), told)),
        *in_lines(sentences.failed(run)),
        *more_checks(run),
        *compared(run),
        *(log_line("" if number else "timeline", text) for number, text in enumerate(staircases(run, records))),
        *in_lines(ends),
    ]


def more_checks(run: Run) -> list[str]:
    """The checks that passed and that no table above has."""
    held = [check for check in run["checks"] if check["passed"] and check["name"] not in (*tables.PROOF, *tables.TIMED)]
    lines = tables.checks(check for check in held if check["unit"] != sentences.FINDINGS).under("checks")
    names: dict[bool, list[str]] = {}
    for check in held:
        if check["unit"] == sentences.FINDINGS:
            names.setdefault(check["detail"] == sentences.UNTIL_ENDED, []).append(check["name"])
    passed = {False: "passed", True: "passed until the run was ended"}
    return lines + [
        line for key in sorted(names) for line in wrapped("checks", f"{passed[key]}: {', '.join(names[key])}")
    ]


def compared(run: Run) -> list[str]:
    """The comparisons that passed or are informational and that no table above has."""
    timed = {variant["name"] for variant in run["variants"]}
    in_tables = (*tables.TRAFFIC, tables.DRAWN, tables.ON_WIRE, *tables.MEMORY)
    left = (c for c in run["comparisons"] if c["passed"] and not (c["name"] in in_tables and c["variant"] in timed))
    return tables.comparisons(left).under("compared")


def rows_not_yet_printed(block: list[str], told: Collection[str]) -> list[str]:
    """Of a block the rows that were not told yet, each under its heading, which may have been; nothing where all
    were."""
    left: list[str] = []
    heading = ""
    for row in block:
        heading = heading if row.startswith(" ") else row
        if words_of_row(row) not in told:
            left += [row] if heading in (row, *left) else [heading, row]
    return left


def words_of_row(row: str) -> str:
    """A row without the widths of its columns, which grow with the rows below."""
    return " ".join(row.split())
