"""What a rank writes down: one record a line in `rank<r>.jsonl`, and nothing that could be computed from others.

Records are the only bridge between a run and its report: `judge.py` reads nothing else, so that a finished run can be
judged again. A line is a JSON object with the record's type name under "record" and its fields beside it. Lengths of
bytes and seconds carry their unit in the field's name.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin


@dataclass(frozen=True)
class Start:
    """The first record of a rank: who it is and with what it runs."""

    rank: int
    run_id: str
    run_mode: str
    world_size: int
    host: str
    config: dict[str, Any]  # every setting, by variable name
    repeat: dict[str, str]  # only those that were set: what repeats the run
    versions: dict[str, str]  # python, torch, lab (hash of the sources), ...
    title: str = ""  # what is run, for a heading: "gpt, 1.6M parameters"


@dataclass(frozen=True)
class Said:
    """A sentence of the lesson that belongs into the report, under a heading such as "predict"."""

    heading: str
    text: str


@dataclass(frozen=True)
class Check:
    """A claim that was tested: it holds if `max_abs_diff <= tolerance` on every rank that wrote one."""

    variant: str  # "" where a check belongs to no variant
    name: str
    max_abs_diff: float
    tolerance: float
    detail: str = ""  # what was seen, where the number alone does not say it


@dataclass(frozen=True)
class Comparison:
    """Predicted beside measured on one rank; decides like a check if `decides`."""

    variant: str
    name: str  # "wire bytes", "called bytes", "peak bytes", "bubble", ...
    unit: str
    predicted: float
    measured: float
    tolerance: float  # absolute, in `unit`
    formula: str = ""
    decides: bool = True


@dataclass(frozen=True)
class Losses:
    """The loss of the global batch at each step; `variant` is "one process" for the dense run."""

    variant: str
    values: list[float]


@dataclass(frozen=True)
class Steps:
    """The timed pass of one variant on one rank, a value a step, warm-up dropped."""

    variant: str
    step_seconds: list[float]
    cpu_seconds: list[float]


@dataclass(frozen=True)
class Called:
    """Bytes and calls of one operation on one axis, a step: tensor bytes times the operation's algorithmic factor."""

    variant: str
    op: str
    axis: str
    calls: float
    raw_bytes: float
    called_bytes: float


@dataclass(frozen=True)
class Wire:
    """Bytes a step that this rank's sockets sent to `peer`, first transmissions alone; retransmits stand apart."""

    variant: str
    peer: int
    sent_bytes: float
    retransmitted_bytes: float


@dataclass(frozen=True)
class Memory:
    """Bytes held by one variant on this rank at the peak of its memory pass, its making and what was there before included."""

    variant: str
    peak_bytes: int


@dataclass(frozen=True)
class Classes:
    """Bytes that one variant held on this rank by class: between two steps, and when the counted step held most."""

    variant: str
    rest_bytes: dict[str, int]  # parameters, gradients, optimizer, activations, communication
    peak_bytes: dict[str, int]


@dataclass(frozen=True)
class MemoryLine:
    """Bytes by class over the counted step: of each of many equal parts of it those at the part's own peak."""

    variant: str
    step_s: float  # longer than a timed step: it is counted meanwhile
    held_bytes: dict[str, list[int]]


@dataclass(frozen=True)
class Activations:
    """The most bytes that this rank held for the backward pass of one variant."""

    variant: str
    peak_bytes: int


@dataclass(frozen=True)
class Clock:
    """What this rank's perf_counter must be given to read as rank 0's, and how far off that may be."""

    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True)
class Timeline:
    """One timed step of a variant on this rank, on rank 0's clock; 0 is the earliest start of all ranks in that step."""

    variant: str
    step: int
    spans: list[list[Any]]  # [kind, label, start_s, end_s], in the order of their ends; they may nest


@dataclass(frozen=True)
class Profile:
    """Where the time of a step went on this rank: median seconds by class, each moment in the innermost class alone."""

    variant: str
    seconds: dict[str, float]  # data, forward, backward, communication, optimizer, waiting


@dataclass(frozen=True)
class Overlap:
    """Of the profiled step: time in communication, and how much of it this rank's backward pass computed meanwhile."""

    variant: str
    communication_s: float
    hidden_s: float


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on that was stopped before; on rank 0."""

    epoch: int
    step: int
    path: str  # of the checkpoint


@dataclass(frozen=True)
class Saved:
    """A checkpoint, or why there is none; on rank 0."""

    step: int  # how many steps are done
    seconds: float  # until it was complete
    held_s: float  # of these the training stood still
    num_bytes: int
    error: str = ""


@dataclass(frozen=True)
class Digest:
    """The sha256 of all final weights of a variant, by which two runs are compared to the bit; on rank 0."""

    variant: str
    sha256: str


@dataclass(frozen=True)
class Skipped:
    """A variant that cannot take these sizes, and why."""

    variant: str
    reason: str


@dataclass(frozen=True)
class Table:
    """A table of the lesson's own; cells are text or numbers."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Chart:
    """A line chart of the lesson's own: `series` maps a name to its [x values, y values]."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[list[float]]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Lost:
    """A rank that is gone, as the survivors agreed."""

    rank: int
    step: int
    reason: str


@dataclass(frozen=True)
class Left:
    """A rank that is gone, and that the others went on without; the words of one of them."""

    rank: int
    step: int
    reason: str


@dataclass(frozen=True)
class Failed:
    """An error that ended this rank's run: its exit code and its sentence."""

    exit_code: int
    error: str


@dataclass(frozen=True)
class End:
    """The last record of a rank that came through to the end; Unix times, in seconds."""

    rank: int
    started_at: float  # the rank's program began, torch not yet imported
    first_step_at: float | None  # the first step of a strategy was done; None in a mode that trains nothing
    ended_at: float
    watch_cpu_s: float  # what the heartbeats took of a core in all


Record = (
    Start
    | Said
    | Check
    | Comparison
    | Losses
    | Steps
    | Called
    | Wire
    | Memory
    | Classes
    | MemoryLine
    | Activations
    | Clock
    | Timeline
    | Profile
    | Overlap
    | Resumed
    | Saved
    | Digest
    | Skipped
    | Table
    | Chart
    | Lost
    | Left
    | Failed
    | End
)
Kind = TypeVar("Kind")
Ranks = dict[int, list[Record]]  # the records of each rank of a run
TYPES: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in Record.__args__}


class BrokenRecord(Exception):
    """A record file that cannot be read; the message names the file and the line."""


def to_line(record: Record) -> str:
    """The record as one line of JSON, without the newline."""
    return json.dumps({"record": type(record).__name__.lower()} | asdict(record))


def from_line(line: str | bytes, where: str = "record") -> Record:
    """The record that `to_line` wrote; raises BrokenRecord that begins with `where`."""
    try:
        values = json.loads(line)
        kind = TYPES[values.pop("record")]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BrokenRecord(f"{where} is not a record of the lab ({error!r})") from None
    wrong = set(values) ^ {entry.name for entry in fields(kind)}
    if wrong:
        raise BrokenRecord(f"{where} is a {kind.__name__} with missing or unknown fields: {', '.join(sorted(wrong))}")
    for entry in fields(kind):
        if not has_type(values[entry.name], entry.type):
            raise BrokenRecord(f"{where} is a {kind.__name__} whose {entry.name} is {values[entry.name]!r}")
    record: Record = kind(**values)
    return record


def has_type(value: Any, annotation: Any) -> bool:
    """Whether `value`, as JSON gives it, is what a field of this annotation may hold."""
    return isinstance(value, _types(annotation))


def _types(annotation: Any) -> tuple[type, ...]:
    """What JSON may hold for a field: list for list[float], and a whole number for a float."""
    if get_origin(annotation) is UnionType:
        return tuple(kind for part in get_args(annotation) for kind in _types(part))
    return (int, float) if annotation is float else (get_origin(annotation) or annotation,)


def read(path: Path) -> list[Record]:
    """All records of one rank's file; raises BrokenRecord naming file and line."""
    lines = path.read_bytes().splitlines()
    return [from_line(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def read_run(run: Path) -> Ranks:
    """The records of every rank of a run, by rank; raises BrokenRecord if there are none."""
    if not run.is_dir():
        raise BrokenRecord(f"{run} is not the folder of a run")
    files = {int(path.stem.removeprefix("rank")): path for path in run.glob("rank[0-9].jsonl")}
    if not files:
        raise BrokenRecord(f"{run} holds no rank<r>.jsonl: it is not the folder of a run")
    return {rank: read(files[rank]) for rank in sorted(files)}


def select(records: Ranks, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
    """All records of one kind with their rank, lowest rank first."""
    for rank in sorted(records):
        for record in records[rank]:
            if isinstance(record, kind):
                yield rank, record


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Write a file so that a reader sees all of it or nothing, even if the writer dies."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text("".join(lines), encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
