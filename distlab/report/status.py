"""What a rank shows of itself while it runs: `live.rank<r>.json` in the run's folder, put in place anew each time.

The file is the rank's word on itself alone: what is known of several ranks together (who is lost, a loss of the whole
batch, whose connection leads where) is found out by whoever reads all of them (distlab/live). So ranks need nothing of
each other for it.
"""

import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field
from msgspec.structs import asdict

from distlab.report.reading import BrokenRecord, from_json, read_regular, to_json, write_atomically
from distlab.report.records import WorldSize

PERIOD_S = 0.25  # from one writing to the next
MOST_BYTES = 16 << 20  # some kB a variant and a connection

Point = tuple[int, float | None]  # [step, this rank's share]
End = tuple[str, int]  # an address and a port
Sent = tuple[End, End, int]  # [here, there, bytes]


class LiveState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rank is now, and what it has seen until now."""

    rank: int
    world_size: WorldSize
    run_mode: str
    host: str
    pid: int
    began_at: float  # Unix time: the rank's program began
    beat: int  # counts the writings
    step: int = 0
    steps: int = 0  # of the timed pass
    work: str = "start"  # what it is at: the name of a variant in the timed pass, else such as "proof of ring"
    variant: str = ""
    phase: str = ""  # within it, where it is known: "all_reduce", "the wait at step 3 of ring"
    phase_s: float = 0.0  # how long it has been in this phase, or in this work
    waits_for: list[int] = field(default_factory=list)  # the ranks that are behind, once it has stood still for long
    losses: dict[str, list[list[Any]]] = field(default_factory=dict)  # of each variant, each a Point
    # Each Sent, by each connection since it was opened, closed ones too.
    sent: list[list[Any]] = field(default_factory=list)
    unmeasured: str = ""  # why `sent` is empty, where the system gives no counters

    def __post_init__(self) -> None:
        msgspec.convert(self.losses, dict[str, list[Point]])
        msgspec.convert(self.sent, list[Sent])
        if not (math.isfinite(self.began_at) and math.isfinite(self.phase_s)):
            raise ValueError("a time that is not finite")


def status_path(folder: Path, rank: int) -> Path:
    """The file of one rank."""
    return folder / f"live.rank{rank}.json"


def places(folder: Path) -> dict[int, Path]:
    """The files that are there, by rank."""
    named = ((path.name.removeprefix("live.rank").removesuffix(".json"), path) for path in folder.glob("live.rank*"))
    return {int(rank): path for rank, path in named if rank.isdecimal()}


def write_status(folder: Path, state: LiveState) -> None:
    """Put the state in place; raises OSError where the folder takes no more."""
    write_atomically(status_path(folder, state.rank), [to_json(asdict(state))])


def read_status(path: Path) -> LiveState:
    """What `write` left; raises BrokenRecord naming the file."""
    try:
        return msgspec.convert(from_json(read_regular(path, MOST_BYTES)), LiveState)
    except OSError as error:
        raise BrokenRecord(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise BrokenRecord(f"{path.name} is not the live state of a rank ({error})") from None
