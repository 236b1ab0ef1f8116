"""What a rank shows of itself while it runs: `live.rank<r>.json` in the run's folder, put in place anew each time.

The file is the rank's word on itself alone: what is known of several ranks together (who is lost, a loss of the whole
batch, whose connection leads where) is found out by whoever reads all of them (workers/live). So ranks need nothing of
each other for it.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from workers.report.lines import BrokenRecord, has_type, write_atomically

PERIOD_S = 0.25  # from one writing to the next


@dataclass(frozen=True)
class LiveState:
    """Where one rank is now, and what it has seen until now."""

    rank: int
    world_size: int
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
    losses: dict[str, list[list[Any]]] = field(default_factory=dict)  # [step, this rank's share] of each variant
    # [[address, port] here, [address, port] there, bytes sent] of each connection since it was opened, closed ones too.
    sent: list[list[Any]] = field(default_factory=list)
    unmeasured: str = ""  # why `sent` is empty, where the system gives no counters


def place(folder: Path, rank: int) -> Path:
    """The file of one rank."""
    return folder / f"live.rank{rank}.json"


def places(folder: Path) -> dict[int, Path]:
    """The files that are there, by rank."""
    named = ((path.name.removeprefix("live.rank").removesuffix(".json"), path) for path in folder.glob("live.rank*"))
    return {int(rank): path for rank, path in named if rank.isdecimal()}


def write(folder: Path, state: LiveState) -> None:
    """Put the state in place; raises OSError where the folder takes no more."""
    write_atomically(place(folder, state.rank), [json.dumps(asdict(state))])


def read(path: Path) -> LiveState:
    """What `write` left; raises BrokenRecord naming the file, and OSError."""
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise BrokenRecord(f"{path.name} is not the live state of a rank ({error})") from None
    known = {entry.name: entry.type for entry in fields(LiveState)}
    if not isinstance(values, dict) or set(values) != set(known):
        raise BrokenRecord(f"{path.name} is not the live state of a rank: its fields are others")
    wrong = [name for name in known if not has_type(values[name], known[name])]
    if wrong or not shaped(values):
        raise BrokenRecord(f"{path.name} has values that are none: {', '.join(wrong) or 'in its lists'}")
    return LiveState(**values)


def shaped(values: dict[str, Any]) -> bool:
    """Whether the lists hold what their fields say."""
    points = [point for curve in values["losses"].values() for point in (curve if isinstance(curve, list) else [None])]
    return (
        all(type(rank) is int for rank in values["waits_for"])
        and all(is_a(point, int, (float, int, type(None))) for point in points)
        and all(
            is_a(each, list, list, int) and is_a(each[0], str, int) and is_a(each[1], str, int)
            for each in values["sent"]
        )
    )


def is_a(value: Any, *kinds: Any) -> bool:
    """Whether `value` is a list of as many entries, each of its kind."""
    return isinstance(value, list) and len(value) == len(kinds) and all(map(isinstance, value, kinds))
