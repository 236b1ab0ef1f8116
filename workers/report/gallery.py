"""All runs as one page: `ranklab gallery` writes runs/index.html, which any browser opens, online or not.

What is in the folder and is no run is named on the page, and so is what of a run cannot be read.
"""

import argparse
import errno
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from workers.config import Config, ConfigError
from workers.report.latest import LATEST
from workers.report.lines import write_atomically
from workers.report.stored import Stored, stored_run
from workers.report.text import printable
from workers.report.units import human_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, draw, write; returns the exit code."""
    asked = parser().parse_args(arguments)
    try:
        runs: Path = asked.runs or Config.read().runs_dir
    except ConfigError as error:
        print("\n".join(f"refused    {fault}" for fault in error.faults))
        return 2
    try:
        stored, others = found(runs, time.time())
    except OSError as error:
        print(f"refused    {runs} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    path = asked.output or runs / "index.html"
    try:
        told = write_gallery(stored, others, runs, path)
    except OSError as error:
        print(f"broken     {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1 if error.errno == errno.ENOSPC else 2
    print(f"gallery    {path}: {told}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="ranklab gallery", allow_abbrev=False,
        description="Write one page of all runs, the newest first, each with a picture, its verdict and a link to its "
        "report. It filters by words, verdict and mode, and needs no network.",
    )  # fmt: skip
    made.add_argument("--runs", type=Path, metavar="DIR", help="the folder of the runs; by default LAB_RUNS_DIR")
    made.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page; by default index.html among the runs"
    )
    return made


def found(runs: Path, now: float) -> tuple[list[Stored], list[str]]:
    """The runs in this folder, and of each other folder in it what it is."""
    stored, others = [], []
    for folder in sorted(runs.iterdir()):
        if not folder.is_dir() or (folder.name == LATEST and folder.is_symlink()):
            continue
        try:
            run = stored_run(folder, now)
        except OSError as error:
            others.append(f"{printable(folder.name)} cannot be read: {error.strerror}")
            continue
        if run:
            stored.append(run)
        else:
            others.append(f"{printable(folder.name)} {'is a link' if folder.is_symlink() else 'holds no run'}")
    return stored, others


def write_gallery(stored: Sequence[Stored], others: Sequence[str], runs: Path, path: Path) -> str:
    """Write the page of these runs, and return what is in it; raises OSError where it cannot be written."""
    from workers.report.entry import entry  # charts take half a second to import: not for --help
    from workers.report.gallery_page import gallery_page

    entries = sorted(map(entry, stored), key=lambda entry: (-entry.began_at, entry.stored.folder.name))
    page = gallery_page(entries, others, runs, path)
    write_atomically(path, [page])
    number = f"{len(entries)} {'run' if len(entries) == 1 else 'runs'}"
    return "; ".join([f"{number}, {human_bytes(path.stat().st_size)}", *others])


if __name__ == "__main__":
    sys.exit(main())
