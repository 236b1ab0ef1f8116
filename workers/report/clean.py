"""Old runs: `ranklab clean` lists them with their sizes, and removes those that an option names.

    --keep 5            all but the newest five
    --older-than 7d     those that ended more than 7 days ago (also 12h, 30m)
    --all               every run

A run is a folder in LAB_RUNS_DIR with records or a verdict in it; nothing else is touched. The run of runs/latest goes
with --all alone, and one that may still be running with none of them.
"""

import argparse
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from workers.config import Config, ConfigError
from workers.report.claim import is_held
from workers.report.latest import point_latest
from workers.report.text import aligned
from workers.report.units import human_bytes

UNITS_S = {"m": 60, "h": 3600, "d": 86400}
# A run whose ranks hold its folder is going on; on another machine none can be seen to. There one whose last record no
# verdict followed is going on, or was killed; its ranks wait LAB_COLLECTIVE_TIMEOUT_S for
# each other, by default half of this.
SILENT_S = 600


class Old(NamedTuple):
    """A finished or broken run: its folder, when it last wrote a record, its bytes on the disk, and what else is to be
    said of it."""

    folder: Path
    written_at: float
    nbytes: int
    checkpoints: int
    latest: bool
    running: bool

    @property
    def note(self) -> str:
        """What somebody has to know who removes it."""
        notes = ["latest"] * self.latest + ["may be running"] * self.running
        return ", ".join(notes + [f"{self.checkpoints} checkpoints"] * bool(self.checkpoints))


def main(arguments: Sequence[str] | None = None) -> int:
    """List, or list and remove; returns the exit code."""
    asked = parser().parse_args(arguments)
    try:
        runs = Config.read().runs_dir
    except ConfigError as error:
        print("\n".join(f"refused    {fault}" for fault in error.faults))
        return 2
    now = time.time()
    found = old_runs(runs, now)
    if asked.keep is None and asked.older_than is None and not asked.all:
        print("\n".join(listed(found, now, f"in {runs}/")))
        print("to remove  --keep 5 (all but the newest five), --older-than 7d, or --all")
        return 0
    gone = chosen(found, now, keep=asked.keep, older_than_s=asked.older_than, everything=asked.all)
    try:
        for old in gone:
            shutil.rmtree(old.folder)
    except OSError as error:
        print(f"broken     {error.filename} cannot be removed: {error.strerror}", file=sys.stderr)
        return 2
    finally:
        mend_latest(runs, old_runs(runs, now))
    print("\n".join(listed(gone, now, f"removed from {runs}/, {len(found) - len(gone)} left")))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="ranklab clean", allow_abbrev=False,
        description="List the runs in LAB_RUNS_DIR with their sizes; with an option, remove those that it names. "
        "The run of runs/latest goes with --all alone, one without a verdict only when it has written nothing for "
        "ten minutes.",
    )  # fmt: skip
    one = made.add_mutually_exclusive_group()
    one.add_argument("--keep", type=count, metavar="N", help="remove all but the newest N")
    one.add_argument("--older-than", type=age, metavar="AGE", help="remove those older than 7d, 12h or 30m")
    one.add_argument("--all", action="store_true", help="remove every run")
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


def old_runs(runs: Path, now: float) -> list[Old]:
    """Every run in this folder, the newest first; a link to a run elsewhere is none."""
    if not runs.is_dir():
        return []
    latest = (runs / "latest").resolve()
    found = []
    for folder in runs.iterdir():
        verdict, records = folder / "run.json", list(folder.glob("rank[0-9].jsonl"))
        if folder.is_symlink() or not (records or verdict.is_file()):
            continue
        written_at = max(path.stat().st_mtime for path in records or [verdict])
        nbytes = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
        checkpoints = len(list(folder.glob("checkpoints/step-*")))
        judged = verdict.is_file() and verdict.stat().st_mtime >= written_at
        running = is_held(folder) or (not judged and now - written_at < SILENT_S)
        found.append(Old(folder, written_at, nbytes, checkpoints, folder.resolve() == latest, running))
    return sorted(found, key=lambda old: (-old.written_at, old.folder.name))


def chosen(
    found: Sequence[Old], now: float, *, keep: int | None, older_than_s: float | None, everything: bool
) -> list[Old]:
    """Those of `found`, the newest first, that the options name."""
    named = found if keep is None else found[keep:]
    if older_than_s is not None:
        named = [old for old in named if now - old.written_at > older_than_s]
    return [old for old in named if not old.running and (everything or not old.latest)]


def listed(found: Sequence[Old], now: float, where: str) -> list[str]:
    """A line a run and their total."""
    rows = [[old.folder.name, human_age(now - old.written_at), human_bytes(old.nbytes), old.note] for old in found]
    total = (
        f"{len(found)} {'run' if len(found) == 1 else 'runs'} {where}, {human_bytes(sum(old.nbytes for old in found))}"
    )
    return [*(aligned(["run", "ended", "size", ""], rows) if rows else []), total]


def human_age(seconds: float) -> str:
    """A span in its largest unit, such as "3 h ago"."""
    unit = next((unit for unit in ("d", "h") if seconds >= UNITS_S[unit]), "m")
    return f"{max(0, seconds) // UNITS_S[unit]:.0f} {unit.replace('m', 'min')} ago"


def mend_latest(runs: Path, left: Sequence[Old]) -> None:
    """Let runs/latest name the newest run that has a verdict, where the one that it named is gone."""
    latest = runs / "latest"
    if not latest.is_symlink() or latest.exists():
        return
    newest = next((old.folder.name for old in left if (old.folder / "run.json").is_file()), None)
    if newest is None:
        latest.unlink()
        return
    point_latest(runs / newest)


if __name__ == "__main__":
    sys.exit(main())
