"""Rank 0's log: what was proven, what was measured beside what was predicted, the verdict, how to repeat it.

A person reads this and often nothing else. Every line begins with one of a few words in the first eleven columns, and
the last line alone says all that a script needs: the verdict, the report's path and the command that reruns it.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from distlab.lab.report import fault_checks, sentences, summary, tables
from distlab.lab.report.records import Ranks, Run
from distlab.lab.report.run_folder import Level
from distlab.lab.report.table import log_line, wrapped
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
    "skipped": lambda run, _records, _rows: [
        line for skip in run["skipped"] for line in wrapped("skipped", f"{skip['variant']}: {skip['reason']}")
    ],
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
    if level == "quiet":
        return [*failed_lines(run), *trouble_lines(run), *summary.last_lines(run, records, report)]
    return [
        *summary.table_lines(run, records),
        *summary.alone_lines(run),
        *summary.times_lines(run),
        *summary.decided_lines(run),
        *summary.failed_lines(run),
        *trouble_lines(run),
        *summary.ended_lines(run, report),
        *summary.last_lines(run, records, report),
    ]


def verdict_lines(run: Run, records: Ranks, report: Path | None, told: Collection[str] = ()) -> list[str]:
    """All lines, in the order in which one learns, but for those that were `told` while the run went on.

    `report` is the page's path, None where none was written.
    """
    lines = [
        *rows_not_yet_printed(mistake(run), told),
        *(each for section in SECTIONS.values() for each in rows_not_yet_printed(section(run, records, ()), told)),
        *failed_lines(run),
        *more_checks(run),
        *compared(run),
        *trouble_lines(run),
        *([] if run["run_mode"] in (SCRIPT, PROOF) else summary.alone_lines(run)),
    ]
    return [*lines, *summary.times_lines(run), *summary.last_lines(run, records, report)]


def failed_lines(run: Run) -> list[str]:
    """What did not hold, a sentence each."""
    return [line for claim in sentences.failures(run) for line in wrapped("FAILED", sentences.failure_sentence(claim))]


def trouble_lines(run: Run) -> list[str]:
    """What else happened to the run: injected faults, messages that were not believed, errors, and ranks that are gone
    or whose records are not here."""
    told = [
        *(("fault", fault_checks.fault_sentence(each)) for each in run.get("drills", [])),
        *([("dropped", sentences.dropped_sentence(run))] if run.get("dropped") else []),
        *(("error", sentence) for sentence in sentences.error_sentences(run)),
        *(("lost", sentences.lost_sentence(lost)) for lost in run["lost"]),
        *([("unseen", sentences.unseen_sentence(run))] if run["unseen"] else []),
    ]
    return [line for word, sentence in told for line in wrapped(word, sentence)]


def more_checks(run: Run) -> list[str]:
    """The checks that passed and that no table above has."""
    held = [check for check in run["checks"] if check["passed"] and check["name"] not in (*tables.PROOF, *tables.TIMED)]
    found = [check for check in held if check["unit"] == sentences.FINDINGS]
    until = [check["name"] for check in found if check["detail"] == sentences.UNTIL_ENDED]
    whole = [check["name"] for check in found if check["detail"] != sentences.UNTIL_ENDED]
    lines = tables.checks(check for check in held if check["unit"] != sentences.FINDINGS).under("checks")
    lines += wrapped("checks", f"passed: {', '.join(whole)}") if whole else []
    return lines + (wrapped("checks", f"passed until the run was ended: {', '.join(until)}") if until else [])


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
