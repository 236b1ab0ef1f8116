"""Judge a finished run again from its records alone, with no cluster: `distlab report runs/<run_id>`.

Exit codes are the run's own (0 all passed, 1 a check failed, 2 refused, 3 lost); 2 also if the records
cannot be read or the report cannot be written. Two runs are only compared: 0. `--clean DAYS`
lists old runs and removes them after asking.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distlab.cli import prints_refusals
from distlab.lab.cluster.launch import die_with
from distlab.lab.config import Config, Refusal
from distlab.lab.report.compare import comparison
from distlab.lab.report.log import verdict_lines
from distlab.lab.report.rank_log import Log, RankLog
from distlab.lab.report.reading import MISFITS, BrokenRecord, read_run, record_files
from distlab.lab.report.records import Ranks, Run
from distlab.lab.report.run_folder import FILE, LATEST, is_running
from distlab.lab.report.table import log_line, printable
from distlab.lab.report.tables import Plan
from distlab.lab.report.verdict import exit_code, judge, write_run

DAY_S = 86_400


@prints_refusals
def main(arguments: Sequence[str] | None = None) -> int:
    """Read, judge, write; returns the exit code."""
    options = parser().parse_args(arguments)
    if bool(options.runs) == (options.clean is not None) or (options.yes and options.clean is None):
        parser().error("name the folders of runs, or --clean DAYS with or without --yes")
    if options.clean is not None:
        return clean(options.clean, unasked=options.yes)
    if options.log.isdecimal():
        options.rank, options.log = int(options.log), "normal"
    if len(options.runs) > 2:
        parser().error(f"name one run to judge it or two to compare them, not {len(options.runs)}")
    if len(options.runs) > 1 and (options.junit or options.page_only or options.figures or options.rank is not None):
        parser().error("--junit, --page-only, --figures and --rank need one run, not two")
    if options.page and not options.page_only:
        parser().error("--page needs --page-only: it names the file that --page-only writes")
    if options.parent is not None:
        die_with(options.parent)
    try:
        if len(options.runs) > 1:
            return compare(*options.runs)
        folder = options.runs[0]
        run, records = read_and_judge(folder)
        if options.rank is not None:
            return print_rank(folder, run, records, options.rank, options.log)
        if options.figures:
            return draw_figures(run, records, options.figures)
        return rebuild(folder, run, records, options.junit, options.page_only, options.page)
    except MISFITS as error:
        folders = ", ".join(map(str, options.runs))
        raise Refusal(f"the records in {folders} do not fit each other ({error!r})") from None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="distlab report",
        description="Judge a finished run again from its records alone: rewrites run.json and report.html, prints the "
        "verdict and returns its exit code. Two runs are compared in one table instead.",
    )
    made.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="folder of a run, such as runs/latest; two to compare"
    )
    made.add_argument(
        "--junit", type=Path, metavar="FILE", help="also write a test case per check, as JUnit XML for a CI"
    )
    made.add_argument(
        "--page-only", action="store_true", help="write only report.html; the exit code is 0 if it was written"
    )
    made.add_argument("--figures", type=Path, metavar="DIR", help="only write each figure of the report as SVG")
    made.add_argument("--rank", type=int, metavar="R", help="only print the log of this rank again, from its records")
    made.add_argument(
        "--log", default="normal", metavar="R", type=rank_or_level,
        help="the same as --rank; or normal or full: the level of detail, full has the steps of all variants",
    )  # fmt: skip
    made.add_argument(
        "--clean", type=days, metavar="DAYS", help="remove the runs of LAB_RUNS_DIR older than this, after asking"
    )
    made.add_argument("--yes", action="store_true", help="with --clean: remove without asking")
    made.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # exit when this process exits
    made.add_argument("--page", type=Path, metavar="FILE", help="the file to write instead; only with --page-only")
    return made


def rank_or_level(word: str) -> str:
    """Parse a rank's number or a log level."""
    if word.isdecimal() or word in ("normal", "full"):
        return word
    raise argparse.ArgumentTypeError(f"{word!r} is neither a rank's number, such as 2, nor normal or full")


def read_and_judge(folder: Path) -> tuple[Run, Ranks]:
    """Judge the records in `folder`; raises BrokenRecord naming file and line."""
    records = read_run(folder)
    try:
        return judge(records), records
    except BrokenRecord as error:
        raise BrokenRecord(f"{folder}: {error}") from None
    except MISFITS as error:
        raise BrokenRecord(f"{folder}: its records do not fit each other ({error!r})") from None


def compare(old: Path, new: Path) -> int:
    """Print a table that compares two runs."""
    print("\n".join(comparison((old, *read_and_judge(old)), (new, *read_and_judge(new))).under("compare")))
    return 0


def print_rank(folder: Path, run: Run, records: Ranks, rank: int, log: Log) -> int:
    """Print one rank's log, from its records, and the verdict."""
    if rank not in records:
        ranks = ", ".join(map(str, sorted(records)))
        raise Refusal(f"--rank {rank} has no records here, allowed: {ranks}")
    own = RankLog(log)
    for record in records[rank]:
        for line in own.lines(record):
            print(line.text)
    for line in own.verdict(run["verdict"], folder):
        print(line.text)
    return 0


def draw_figures(run: Run, records: Ranks, into: Path) -> int:
    """Write the figures and print their path."""
    from distlab.lab.report.export import write_figures

    drawn = write_figures(into, run, records)
    print(log_line("figures", f"{len(drawn)} in {into}, as SVG: {', '.join(path.stem for path in drawn)}"))
    return 0


def rebuild(folder: Path, run: Run, records: Ranks, junit: Path | None, page_only: bool, path: Path | None) -> int:
    """Write the requested files, and print the verdict like rank 0."""
    from distlab.lab.report.page import write_page

    page = write_page(folder, run, records, path, plan_of(folder, records))
    if page_only:
        return 0
    write_run(folder, run)
    if junit is not None:
        from distlab.lab.report.export import write_junit

        write_junit(junit, run)
    print("\n".join(verdict_lines(run, records, page)))
    return exit_code(run)


def plan_of(folder: Path, records: Ranks) -> Plan | None:
    """Return the planner's numbers for this run's variants; None for a mode it does not model."""
    from distlab.tools.plan.own_runs import planned

    found = planned(folder, records)
    if found is None:
        return None
    return Plan({name: (cost.step_s, cost.held_bytes) for name, cost in found.costs.items()}, found.sources)


def days(text: str) -> int:
    """Parse the greatest age of a run."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days such as 7, 1 at least")
    return int(text)


def clean(days: int, *, unasked: bool) -> int:
    """List the runs older than so many days, and remove them once the person at the terminal agrees."""
    runs = Config.read().runs_dir
    found = old_runs(runs, days)
    for folder in found:
        print(log_line("old", printable(str(folder))))
    if not found:
        print(log_line("clean", f"no run in {runs}/ that may be removed is older than {days} days"))
    elif not unasked and not sys.stdin.isatty():
        raise Refusal("there is no terminal to ask in: --yes removes them without asking")
    elif not unasked and not agreed(f"remove {len(found)} {'run' if len(found) == 1 else 'runs'}? [y/N] "):
        print("nothing is removed")
    else:
        still_old = old_runs(runs, days)  # one may have resumed since it was listed
        for folder in filter(still_old.__contains__, found):
            remove(folder)
    return 0


def remove(folder: Path) -> None:
    """Remove a run and report it."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        where = printable(str(error.filename))
        raise Refusal(f"old runs cannot be removed: {error.strerror}: {where}") from None
    print(log_line("removed", printable(str(folder))))


def agreed(question: str) -> bool:
    """Return whether the user types yes; any other answer, and Ctrl-D, is no."""
    print(question, end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def old_runs(runs: Path, days: int) -> list[Path]:
    """Return the runs without writes for so many days, oldest first; except the newest, that of
    runs/latest, runs with a live rank, and links."""
    written_at = {}
    for folder in runs.iterdir() if runs.is_dir() else ():
        marks = [*record_files(folder).values(), *(folder / name for name in ("run.json", FILE))]
        there = [mark.lstat().st_mtime for mark in marks if mark.is_file()]
        if there and not folder.is_symlink():
            written_at[folder] = max(there)
    by_age = sorted(written_at, key=lambda folder: written_at[folder])
    latest = os.path.realpath(runs / LATEST)
    bound = time.time() - days * DAY_S
    old = [folder for folder in by_age[:-1] if written_at[folder] < bound and os.path.realpath(folder) != latest]
    return [folder for folder in old if not is_running(folder)]


if __name__ == "__main__":
    sys.exit(main())
