"""Live states of ranks that never were, and a folder of a run that holds them."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distlab.report import progress
from distlab.report.progress import LiveState
from distlab.report.reading import to_line
from distlab.report.records import Record
from tests.report.made_up import start

BEGAN_AT = 1_000_000.0


def state(rank: int = 0, beat: int = 1, **others: Any) -> LiveState:
    """Of a rank of three, in step 4 of ring."""
    made = LiveState(
        rank, 3, "dp", f"worker{rank}", 100 + rank, BEGAN_AT, beat, step=4, steps=20, work="ring", variant="ring"
    )
    return replace(made, **others)


def run_of(folder: Path, *states: LiveState) -> Path:
    """The folder of a run with these states."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in states:
        progress.write_status(folder, each)
    return folder


def recorded(folder: Path, rank: int, *records: Record) -> None:
    """Begin the records of a rank."""
    lines = [to_line(each) + "\n" for each in (start(rank, 3), *records)]
    (folder / f"rank{rank}.jsonl").write_text("".join(lines))
