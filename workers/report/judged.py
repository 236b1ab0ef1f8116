"""`run.json` as a page of a run that goes on reads it: the fields that it needs, each as it has to be."""

from pathlib import Path
from typing import Literal, TypedDict

import msgspec

from workers.report.claims import Run
from workers.report.json_text import from_json
from workers.report.lines import BrokenRecord
from workers.report.records import WorldSize
from workers.report.regular import read_regular

FILE = "run.json"
MOST_BYTES = 64 << 20  # a few hundred bytes a check and a rank


class Claim(TypedDict):
    """A check or a comparison."""

    variant: str
    name: str
    passed: bool


class Gone(TypedDict):
    """A rank that was lost, or left."""

    rank: int
    step: int | None
    reason: str


class Error(TypedDict):
    """What ended a rank."""

    error: str


class Variant(TypedDict):
    """What was measured of one; here its name alone is needed."""

    name: str


class Needed(TypedDict):
    """The fields that a headline needs."""

    run_mode: str
    world_size: WorldSize
    verdict: Literal["pass", "fail", "lost", "refused"]
    proven: bool
    variants: list[Variant]
    lost: list[Gone]
    errors: list[Error]
    checks: list[Claim]
    comparisons: list[Claim]


def read_judged(folder: Path) -> Run:
    """The verdict in the folder of a run; raises BrokenRecord with the reason, and FileNotFoundError where there is
    none."""
    try:
        run: Run = from_json(read_regular(folder / FILE, MOST_BYTES))
        msgspec.convert(run, Needed)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BrokenRecord(str(error.strerror)) from None
    except (ValueError, msgspec.ValidationError) as error:
        raise BrokenRecord(f"it is no verdict of the lab ({error})") from None
    return run
