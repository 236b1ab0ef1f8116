"""A run as the gallery shows it: what is read of its folder, and what is wrong with it where something is.

500 runs have to take seconds, so of the records only those lines are read that a card needs. What cannot be read is
said on the card, and ends nothing.
"""

from typing import NamedTuple

from workers.report.judged import FILE, read_judged
from workers.report.lines import MISFITS, MOST_BYTES, BrokenRecord, from_line, record_files
from workers.report.records import End, Losses, Ranks, Start, Timeline, select
from workers.report.regular import regular
from workers.report.sentences import headline
from workers.report.stored import Stored
from workers.report.thumbnail import Thumbnail, thumbnail

# How the lines of the kinds that are read begin (lines.py, to_line).
WANTED = tuple(f'{{"record": "{kind.__name__.lower()}"'.encode() for kind in (Start, End, Losses, Timeline))
RUNNING, UNFINISHED, BROKEN = "running", "unfinished", "broken"  # beside the verdicts of run.json


class Verdict(NamedTuple):
    """What `run.json` says of a run, or why it says nothing."""

    word: str  # pass, fail, lost, refused, running, unfinished or broken
    told: str
    mode: str = ""
    world_size: int = 0  # 0: unknown, as the mode then is
    variants: tuple[str, ...] = ()


class Entry(NamedTuple):
    """One run of the gallery."""

    stored: Stored
    verdict: Verdict
    faults: list[str]  # a sentence for each file of records that is broken
    title: str
    settings: list[str]  # those that were chosen, as NAME=VALUE
    began_at: float  # Unix time; where no rank came to its end, when one last wrote
    duration_s: float | None  # None where no rank came to its end
    thumbnail: Thumbnail


def entry(stored: Stored) -> Entry:
    """All that a card says of a run."""
    records, faults = glimpse(stored)
    start = next((start for _, start in select(records, Start)), None)
    verdict = verdict_of(stored)
    if start and not verdict.world_size:
        verdict = verdict._replace(mode=start.run_mode, world_size=start.world_size)
    ends = [end for _, end in select(records, End)]
    began_at = min((end.started_at for end in ends), default=stored.written_at)
    try:
        drawing = thumbnail(records, verdict.world_size, verdict.mode)
    except MISFITS as error:
        faults.append(f"its timeline or losses are none of the lab's ({error!r})")
        drawing = thumbnail({}, verdict.world_size, verdict.mode)
    return Entry(
        stored,
        verdict,
        faults,
        title=start.title if start else "",
        settings=[f"{name}={value}" for name, value in start.repeat.items()] if start else [],
        began_at=began_at,
        duration_s=max(end.ended_at for end in ends) - began_at if ends else None,
        thumbnail=drawing,
    )


def glimpse(stored: Stored) -> tuple[Ranks, list[str]]:
    """The records that are wanted, by rank, and a sentence for each file that breaks off or cannot be read."""
    records: Ranks = {}
    faults = []
    for rank, path in record_files(stored.folder).items():
        found = records.setdefault(rank, [])
        try:
            with regular(path, MOST_BYTES) as lines:
                for number, line in enumerate(lines, 1):
                    if line.startswith(WANTED):
                        found.append(from_line(line, f"{path.name}, line {number},"))
        except BrokenRecord as error:
            faults.append(str(error))
        except OSError as error:
            faults.append(f"{path.name} cannot be read: {error.strerror}")
    return records, faults


def verdict_of(stored: Stored) -> Verdict:
    """What became of a run, by `run.json`; without one, whether it goes on."""
    try:
        run = read_judged(stored.folder)
    except FileNotFoundError:
        if stored.held:
            return Verdict(RUNNING, "its ranks are alive")
        may_run = " or runs elsewhere: it wrote within ten minutes" if stored.running else ""
        return Verdict(UNFINISHED, f"no {FILE}: it ended before a verdict{may_run}")
    except BrokenRecord as error:
        return Verdict(BROKEN, f"{FILE} cannot be read: {error}")
    known = run["run_mode"], run["world_size"], tuple(variant["name"] for variant in run["variants"])
    told = headline(run)
    if stored.held:
        return Verdict(RUNNING, f"its ranks are alive; the attempt before: {run['verdict']}, {told}", *known)
    return Verdict(run["verdict"], told, *known)
