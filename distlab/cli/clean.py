"""Old runs: `distlab clean` lists them with their sizes, and removes those that an option names, after asking.

    --keep 5            all but the newest five
    --older-than 7d     those that ended more than 7 days ago (also 12h, 30m)
    --all               every run
    --yes               without asking, as where there is no terminal to ask in

A run is a folder in LAB_RUNS_DIR with records or a verdict in it, or one that a run has claimed; a link to a run
elsewhere is none, and nothing else is touched. The run of runs/latest goes with --all alone, and one that may still be
running with none of them.
"""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from distlab.config import Config, ConfigError
from distlab.report.reading import MAKE_ONE, record_files
from distlab.report.run_folder import FILE, LATEST, is_held, point_latest
from distlab.report.table import aligned, printable
from distlab.report.units import human_bytes

UNITS_S = {"m": 60, "h": 3600, "d": 86400}
# A run whose ranks hold its folder is going on; on another machine none can be seen to. There one whose last record no
# verdict followed is going on, or was killed; its ranks wait LAB_COLLECTIVE_TIMEOUT_S for
# each other, by default half of this.
SILENT_S = 600


class Stored(NamedTuple):
    """A finished, broken or running run: its folder, when it last wrote a record, its bytes on the disk, and what else
    is to be said of it."""

    folder: Path
    written_at: float
    nbytes: int
    checkpoints: int
    latest: bool
    running: bool  # its ranks are alive, or may be so on another machine

    @property
    def note(self) -> str:
        """What somebody has to know who removes it."""
        notes = ["latest"] * self.latest + ["may be running"] * self.running
        return ", ".join(notes + [f"{self.checkpoints} checkpoints"] * bool(self.checkpoints))


def stored_runs(runs: Path, now: float) -> tuple[list[Stored], list[str]]:
    """Every run in this folder, the newest first, and a sentence for each folder of which nothing can be known; raises
    OSError where `runs` cannot be read."""
    if not runs.is_dir():
        return [], []
    found, faults = [], []
    for folder in sorted(runs.iterdir()):
        try:
            stored = stored_run(folder, now)
        except OSError as error:
            faults.append(f"{printable(folder.name)} cannot be read: {error.strerror}")
            continue
        if stored:
            found.append(stored)
    return sorted(found, key=lambda stored: (-stored.written_at, stored.folder.name)), faults


def stored_run(folder: Path, now: float) -> Stored | None:
    """The run in this folder, or None where it holds none; raises OSError where it cannot be read."""
    verdict, records = folder / "run.json", list(record_files(folder).values())
    marks = records or [path for path in (verdict, folder / FILE) if path.is_file()]
    if folder.is_symlink() or not marks:
        return None
    written_at = max(path.lstat().st_mtime for path in marks)
    checkpoints = len(list(folder.glob("checkpoints/step-*")))
    judged = verdict.is_file() and verdict.stat().st_mtime >= written_at
    running = is_held(folder) or (not judged and now - written_at < SILENT_S)
    latest = os.path.realpath(folder.parent / LATEST) == os.path.realpath(folder)  # a link may lead to itself
    return Stored(folder, written_at, bytes_in(folder), checkpoints, latest, running)


def bytes_in(folder: Path) -> int:
    """Of all files below it that can be seen; links are not followed, and a run that goes on may remove some."""
    num_bytes, left = 0, [str(folder)]
    while left:
        with suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                else:
                    with suppress(OSError):
                        num_bytes += entry.stat(follow_symlinks=False).st_size
    return num_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """List, or list and remove; returns the exit code."""
    asked = parser().parse_args(arguments)
    try:
        runs = Config.read().runs_dir
    except ConfigError as error:
        print("\n".join(f"refused    {fault}" for fault in error.faults))
        return 2
    now = time.time()
    try:
        found, faults = stored_runs(runs, now)
    except OSError as error:
        print(f"refused    {runs} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    for fault in faults:
        print(f"left out   {fault}", file=sys.stderr)
    if not found:
        print(f"no run     in {runs}/: {MAKE_ONE}")
        return 0
    if asked.keep is None and asked.older_than is None and not asked.all:
        print("\n".join([*run_lines(found, now), total(found, f" in {runs}/")]))
        print("to remove  --keep 5 (all but the newest five), --older-than 7d, or --all")
        return 0
    named = chosen(found, now, keep=asked.keep, older_than_s=asked.older_than, everything=asked.all)
    if named and not asked.yes and not sys.stdin.isatty():
        print(
            f"refused    there is no terminal to ask in: --yes removes {total(named)}, without asking", file=sys.stderr
        )
        return 2
    print("".join(f"{line}\n" for line in run_lines(named, now)), end="")
    if named and not asked.yes and not agreed(f"remove {total(named)}?"):
        print("nothing is removed")
        return 0
    return remove(runs, named)


def agreed(question: str) -> bool:
    """Whether the person at the terminal says yes; whatever else is said, and Ctrl-D, is a no."""
    print(f"{question} [y/N] ", end="", flush=True)
    answer = sys.stdin.readline()
    if not answer:  # Ctrl-D: the line of the question is still open
        print()
    return answer.strip().lower() in ("y", "yes")


def remove(runs: Path, named: Sequence[Stored]) -> int:
    """Remove these runs, but for one that goes on again since they were listed; returns the exit code."""
    now = time.time()
    there = {stored.folder: stored for stored in stored_runs(runs, now)[0]}
    gone = []
    asked = [stored for stored in named if stored.folder in there and not there[stored.folder].running]
    for stored in asked:
        try:
            shutil.rmtree(stored.folder)
            gone.append(stored)
        except (OSError, RecursionError) as error:
            what = error.strerror if isinstance(error, OSError) else "its folders are nested too deeply"
            print(f"broken     {printable(str(stored.folder))} cannot be removed: {what}", file=sys.stderr)
    mend_latest(runs, stored_runs(runs, now)[0])
    print(total(gone, f" removed from {runs}/, {len(there) - len(gone)} left"))
    return 0 if gone == asked else 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="distlab clean", allow_abbrev=False,
        description="List the runs in LAB_RUNS_DIR with their sizes; with an option, ask, and remove those that it "
        "names. The run of runs/latest goes with --all alone, one without a verdict only when it has written nothing "
        "for ten minutes.",
    )  # fmt: skip
    one = made.add_mutually_exclusive_group()
    one.add_argument("--keep", type=count, metavar="N", help="remove all but the newest N")
    one.add_argument("--older-than", type=age, metavar="AGE", help="remove those older than 7d, 12h or 30m")
    one.add_argument("--all", action="store_true", help="remove every run")
    made.add_argument("--yes", action="store_true", help="remove without asking")
    return made


def count(text: str) -> int:
    """How many runs are kept."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of runs such as 5")
    return int(text)


def age(text: str) -> float:
    """Seconds of an age such as 7d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 7d, 12h or 30m")
    return float(match[1]) * UNITS_S[match[2]]


def chosen(
    found: Sequence[Stored], now: float, *, keep: int | None, older_than_s: float | None, everything: bool
) -> list[Stored]:
    """Those of `found`, the newest first, that the options name."""
    named = found if keep is None else found[keep:]
    if older_than_s is not None:
        named = [old for old in named if now - old.written_at > older_than_s]
    return [old for old in named if not old.running and (everything or not old.latest)]


def run_lines(found: Sequence[Stored], now: float) -> list[str]:
    """A line a run, under a heading."""
    rows = [
        [printable(old.folder.name), human_age(now - old.written_at), human_bytes(old.nbytes), old.note]
        for old in found
    ]
    return aligned(["run", "ended", "size", ""], rows) if rows else []


def total(found: Sequence[Stored], where: str = "") -> str:
    """How many runs they are, where, and their bytes: "12 runs in runs/, 340 MB"."""
    number = f"{len(found)} {'run' if len(found) == 1 else 'runs'}"
    return f"{number}{where}, {human_bytes(sum(old.nbytes for old in found))}"


def human_age(seconds: float) -> str:
    """A span in its largest unit, such as "3 h ago"."""
    unit = next((unit for unit in ("d", "h") if seconds >= UNITS_S[unit]), "m")
    return f"{max(0, seconds) // UNITS_S[unit]:.0f} {unit.replace('m', 'min')} ago"


def mend_latest(runs: Path, left: Sequence[Stored]) -> None:
    """Let runs/latest name the newest run that has a verdict, where the one that it named is gone."""
    latest = runs / LATEST
    if not latest.is_symlink() or latest.exists():
        return
    newest = next((old.folder.name for old in left if (old.folder / "run.json").is_file()), None)
    if newest is None:
        latest.unlink()
        return
    point_latest(runs / newest)


if __name__ == "__main__":
    sys.exit(main())
