"""Two runs in one table: verdicts, settings that differ, and each variant's costs, the new run's relative to the old
one's."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distlab.lab.report.page import curves, setting_text
from distlab.lab.report.records import Ranks, Run
from distlab.lab.report.sentences import claim_name
from distlab.lab.report.table import Column, Table
from distlab.lab.report.tables import verdict
from distlab.lab.report.units import human_bytes, milliseconds
from distlab.lab.report.verdict import slowest

Judged = tuple[Path, Run, Ranks]  # the folder, the verdict, the records
Row = list[Any]
# A rank's identity and its folder say nothing about what is run.
IGNORED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LAB_RUN_ID", "LAB_RUNS_DIR")
# The compared numbers of each variant: name in the table, and field of run.json.
MEASURES = {
    "ms per step, slowest rank's median": "step_seconds",
    "sent per step, rank that sends most": "wire_bytes",
    "peak memory, fullest rank": "peak_bytes",
    "memory at rest, fullest rank": "rest_bytes",
}


def names(old: Judged, new: Judged) -> list[str]:
    """Return names for the runs: their ids, else their folders' names, else the whole paths."""
    both = (old, new)
    tried = ([run["run_id"] for _, run, _ in both], [folder.resolve().name for folder, _, _ in both])
    return next((found for found in tried if found[0] != found[1]), [str(folder) for folder, _, _ in both])


def comparison(old: Judged, new: Judged) -> Table:
    """Return one row per different setting, per claim with another result, and per number of either run."""
    runs = [old[1], new[1]]
    rows = [["verdict", *(run["verdict"].upper() for run in runs), ""]]
    rows += [*settings(runs), *claims(runs), *last_losses([old[2], new[2]]), *measured(runs)]
    first, second = names(old, new)
    columns = [Column(""), Column(first, "value"), Column(second, "value"), Column("ratio", "number")]
    return Table(columns, rows)


def settings(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield mode, settings and versions that differ."""
    if runs[0]["run_mode"] != runs[1]["run_mode"]:
        yield ["RUN_MODE", *(run["run_mode"] for run in runs), ""]
    for kind, word in (("config", ""), ("versions", "version of ")):
        for name in dict.fromkeys(name for run in runs for name in run[kind]):
            values = [run[kind].get(name) for run in runs]
            if values[0] != values[1] and name not in (*IGNORED, "RUN_MODE"):
                yield [word + name, *map(setting_text, values), ""]


def claims(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield checks and comparisons that failed in a run, or that only one run made."""
    found = [{claim_name(each): verdict([each]) for each in run["checks"] + run["comparisons"]} for run in runs]
    for name in dict.fromkeys([*found[0], *found[1]]):
        words = [of_run.get(name, "-") for of_run in found]
        if words[0] != words[1] or "FAILED" in words:
            yield [name, *words, ""]


def last_losses(of_runs: Sequence[Ranks]) -> Iterator[Row]:
    """Yield the loss of each curve's last step."""
    found = [{name: y[-1] for name, (_, y) in curves(records).items() if y} for records in of_runs]
    for name in dict.fromkeys([*found[0], *found[1]]):
        values = [of_run.get(name) for of_run in found]
        yield [f"{name}: last loss", *("-" if value is None else f"{value:.6g}" for value in values), ""]


def measured(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield the numbers of each variant that either run measured."""
    of_runs = [{variant["name"]: variant for variant in run["variants"]} for run in runs]
    for variant in dict.fromkeys([*of_runs[0], *of_runs[1]]):
        for what, field in MEASURES.items():
            write = milliseconds if field == "step_seconds" else human_bytes
            old, new = (slowest(found[variant][field]) if variant in found else None for found in of_runs)
            if old or new:
                ratio = f"{new / old:.2f}" if old and new else ""
                yield [f"{variant}: {what}", write(old), write(new), ratio]
