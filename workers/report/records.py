"""What a rank writes down: one record a line in `rank<r>.jsonl`, and nothing that could be computed from others.

Records are the only bridge between a run and its report: `judge.py` reads nothing else, so that a finished run can be
judged again. Lengths of bytes and seconds carry their unit in the field's name.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from workers.config import MAX_WORLD_SIZE

WorldSize = Annotated[int, range(1, MAX_WORLD_SIZE + 1)]
Scalar = str | float | bool | None
Flat = Scalar | list[Scalar] | dict[str, Scalar]
Setting = Annotated[Any, Flat | list[Flat] | dict[str, Flat]]
Cell = Annotated[Any, Scalar]
Span = Annotated[list[Any], tuple[str, str, float, float]]  # [kind, label, start_s, end_s]
# [operation, ranks, bytes that this rank sends, bytes of its tensors, tag, start_s, end_s]; the ranks of a send or
# receive are from whom to whom.
Call = Annotated[list[Any], tuple[str, list[int], float, float, int | None, float, float]]
Axes = Annotated[list[list[float]], tuple[list[float | None], list[float | None]]]  # [x values, y values]


@dataclass(frozen=True)
class Start:
    """The first record of a rank: who it is and with what it runs."""

    rank: int
    run_id: str
    run_mode: str
    world_size: WorldSize
    host: str
    config: dict[str, Setting]  # by variable name
    repeat: dict[str, str]  # only those that were set: what repeats the run
    versions: dict[str, str]  # python, torch, lab (hash of the sources), ...
    title: str = ""  # what is run, for a heading: "gpt, 1.6M parameters"
    by_torch: list[str] = field(default_factory=list)  # the variants that are PyTorch's own
    mistake: dict[str, str] = field(default_factory=dict)  # that LAB_BUG makes: name, what, check; empty without one
    says_claims: bool = False  # whether an Expected follows; False in the records of a lab that had none


@dataclass(frozen=True)
class Expected:
    """The checks and comparisons that a run of these settings has to have made, by whoever comes through to its end."""

    claims: list[list[Any]]  # [variant, name, times, whether one rank has to, or each]


@dataclass(frozen=True)
class Waived:
    """An expected claim that this rank did not make since there was nothing to hold, and why; a name that ends
    in a space stands for all that begin so."""

    variant: str
    name: str
    why: str
    times: int = 1


@dataclass(frozen=True)
class Lesson:
    """What a mode is about; on rank 0."""

    idea: list[str]  # paragraphs
    variants: dict[str, str]  # each in a sentence
    predictions: list[list[str]]  # rows of variant, what, formula, value, calls


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
    control: str = ""  # what makes it fail: `LAB_BUG=<mistake>`, or `tests/<file>::<test>`
    unit: str = ""  # of both, where they are no plain numbers: "epsilons of bfloat16"


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
    control: str = ""  # as of a Check
    shown: str = ""  # why it is only shown


@dataclass(frozen=True)
class Losses:
    """The loss of the global batch at each step; `variant` is "one process" for the dense run."""

    variant: str
    # None: of before a resume, and no rank knew all shares of it.
    values: Annotated[Sequence[float | None], list[float | None]]

    @property
    def numbers(self) -> list[float]:
        """NaN where it is not known."""
        return [math.nan if value is None else value for value in self.values]


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
    """Bytes held by one variant on this rank at the peak of its memory pass, its making and what was there before
    included."""

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
    """One recorded step of a variant on this rank, on rank 0's clock; 0 is the earliest start of all ranks in that
    step."""

    variant: str
    step: int
    spans: list[Span]  # in the order of their ends; they may nest


@dataclass(frozen=True)
class Messages:
    """What this rank called in the step of its timeline, on the same clock."""

    variant: str
    calls: list[Call]  # in the order of their starts


@dataclass(frozen=True)
class Ideal:
    """The step as the schedule of a variant has it, if no message took time: each rank's spans; on rank 0."""

    variant: str
    spans: list[list[Span]]  # of each rank


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
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Chart:
    """A line chart of the lesson's own."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, Axes]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Finding:
    """What is wrong with a script that was checked: a sentence that can be acted on, and whose it is; on rank 0."""

    check: str
    sentence: str
    ranks: list[int]


@dataclass(frozen=True)
class Dropped:
    """The messages that came to this rank and were not believed: counted by what was wrong, and by whose address."""

    by_fault: dict[str, int]
    by_source: dict[str, int]


@dataclass(frozen=True)
class Corrupted:
    """A tensor of a variant that ranks held alike and that differed, the first of an audit; on rank 0."""

    variant: str
    step: int
    tensor: str  # "gradients.<parameter>" or "weights.<parameter>"
    ranks: list[int]  # by majority the odd ones, else all that hold it
    majority: bool
    others: int  # tensors that differed in the same audit


@dataclass(frozen=True)
class Planned:
    """A fault that LAB_FAULTS plans: what it is, and what should come of it; on every rank."""

    number: int
    event: str  # in words: "kill rank 2 at step 5"
    kind: str
    rank: int
    outcome: str  # what should come of it, as workers/report/drills.py names it
    bound_s: float  # within which
    step: int | None = None
    checks: list[str] = field(
        default_factory=list
    )  # of the mode, that see a flipped bit; none: those of the timed steps


@dataclass(frozen=True)
class Injected:
    """A planned fault that was made, by the rank that made it, just before."""

    number: int
    rank: int
    step: int
    variant: str
    at: float  # Unix time, in seconds
    detail: str = ""  # of a flipped bit the tensor and the numbers; of a checkpoint the file
    outcome: str = ""  # where it is another than was planned: "named" where other ranks hold a copy


@dataclass(frozen=True)
class Refused:
    """What was said of a checkpoint that a drill had damaged, by a look such as a resumed run takes."""

    number: int
    sentence: str


@dataclass(frozen=True)
class Stood:
    """When steps of a variant stood on this rank, or began where nobody knows more; Unix times, in their order. Of a
    run with LAB_FAULTS a record a step, of a run whose ranks come and go one a variant."""

    variant: str
    at: list[float]


@dataclass(frozen=True)
class Changed:
    """The members of a run whose ranks come and go are others from a step on, as one that went on saw it."""

    variant: str
    step: int
    at: float  # Unix time: it noticed
    what: str  # "lost", "asked" to be let in, or all "restart"
    members: list[int]  # from then on


@dataclass(frozen=True)
class Unshared:
    """The machines share no disk, so each holds what its own ranks write: the host of every rank."""

    hosts: list[str]


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
    back: bool = False  # it was started again, and found its way back


@dataclass(frozen=True)
class Failed:
    """An error that ended this rank's run: its exit code and its sentence."""

    exit_code: int
    error: str
    at: float = 0.0  # Unix time, in seconds


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
    | Expected
    | Waived
    | Lesson
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
    | Messages
    | Ideal
    | Profile
    | Overlap
    | Resumed
    | Saved
    | Digest
    | Skipped
    | Table
    | Chart
    | Finding
    | Dropped
    | Corrupted
    | Planned
    | Injected
    | Refused
    | Stood
    | Changed
    | Unshared
    | Lost
    | Left
    | Failed
    | End
)
Kind = TypeVar("Kind")
Ranks = dict[int, list[Record]]  # the records of each rank of a run
TYPES: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in Record.__args__}


def select(records: Ranks, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
    """All records of one kind with their rank, lowest rank first."""
    for rank in sorted(records):
        for record in records[rank]:
            if isinstance(record, kind):
                yield rank, record
