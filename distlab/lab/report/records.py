"""The records of a rank: one per line in `rank<r>.jsonl`, without anything that follows from other records.

The report uses nothing but records: `verdict.py` reads only them, so that a finished run can be judged again. Fields
with bytes or seconds have the unit in their name.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar, Union

import msgspec
from msgspec import field

from distlab.lab.config import MAX_WORLD_SIZE

WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]
Scalar = str | int | float | bool | None
Flat = Scalar | list[Scalar] | dict[str, Scalar]
Setting = Scalar | list[Flat] | dict[str, Flat]
# Row types of some records, as lists since JSON has no tuples.
Span = tuple[str, str, float, float]  # [kind, label, start_s, end_s]
# [operation, ranks, bytes that this rank sends, bytes of its tensors, tag, start_s, end_s]; the ranks of a send or
# receive are [source, destination].
Call = tuple[str, list[int], float, float, int | None, float, float]
Axes = tuple[list[float | None], list[float | None]]  # [x values, y values]
# [parameter, shape on this rank, full shape, first and last index of each of its boxes along the first axis that is
# cut, bytes]
ParameterRow = tuple[str, list[int], list[int], list[list[int]], int]
# A Call, its tensors in words, and how long this rank waited in it for which one; -1 for none.
FirstCall = tuple[str, list[int], float, float, int | None, float, float, str, float, int]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="record", tag=str.lower):
    """A record; in its file, "record" has the name of its type."""

    INSIDE: ClassVar[Mapping[str, Any]] = {}  # the element types of list and mapping fields

    def __post_init__(self) -> None:
        for name, kind in self.INSIDE.items():
            msgspec.convert(getattr(self, name), kind)


class Start(Line, frozen=True):
    """The first record of a rank: its identity and its settings."""

    rank: int
    run_id: str
    run_mode: str
    world_size: WorldSize
    host: str
    config: dict[str, Any]  # by variable name, each a Setting
    repeat: dict[str, str]  # only the variables that were set: they repeat the run
    versions: dict[str, str]  # python, torch, lab (hash of the sources), ...
    title: str = ""  # for a heading: "gpt, 1.6M parameters"
    by_torch: list[str] = field(default_factory=list)  # the variants that are PyTorch's own
    mistake: dict[str, str] = field(default_factory=dict)  # injected by LAB_BUG: name, what, check; empty without one
    says_claims: bool = False  # whether an Expected follows; False in records of older labs
    idea: str = ""  # of the mode, in a sentence
    stories: dict[str, str] = field(default_factory=dict)  # what a rank does in each variant
    started_by: str = ""  # the command that started the ranks, such as ./run; empty in older records

    INSIDE = {"config": dict[str, Setting]}


class Placed(Line, frozen=True):
    """This rank's place: address, device, index along each axis of the mesh, and neighbours."""

    ip: str
    device: str
    axes: dict[str, list[int]]  # by name [index, ranks along it]
    neighbours: dict[str, int]  # "previous stage": rank


class Given(Line, frozen=True):
    """This rank's input of a step: sample numbers in the global batch, and its microbatches."""

    step: int
    samples: list[int]
    batch: int  # samples of all ranks
    microbatches: list[int]  # samples of each


class Holds(Line, frozen=True):
    """The parameters of a variant on this rank, whole or in part."""

    variant: str
    parameters: list[list[Any]]  # each a ParameterRow

    INSIDE = {"parameters": list[ParameterRow]}


class FirstStep(Line, frozen=True):
    """The first step of a variant on this rank: spans and calls, in seconds since the first rank began, on rank 0's
    clock."""

    variant: str
    step: int
    seconds: dict[str, float]  # by class, as in a Profile
    spans: list[list[Any]]  # each a Span
    calls: list[list[Any]]  # each a FirstCall, in the order of their starts

    INSIDE = {"spans": list[Span], "calls": list[FirstCall]}


class CallSample(msgspec.Struct, frozen=True):
    """Sample numbers of one call in the logged step, before and after, from the same positions on all ranks."""

    op: str
    ranks: list[int]  # of the group; [source, destination] of a send or receive
    calls: list[int]  # of the FirstStep, by index
    label: str  # of the phase around it, such as "unit 1"
    parameters: list[str]  # whose values or gradients it has
    shape: list[int]  # of the input
    inside: str  # the module whose pass makes it: "1.attention"
    backward: bool
    at_once: bool  # whether it was waited for before any other event
    wait_s: list[float]  # start and end of the wait for it; empty without its own wait
    tensor: str  # the sampled parameter; empty if it has no name
    given: list[float]
    taken: list[float]
    of_ranks: list[tuple[int, float]]  # each rank, and its first number
    start_s: float = 0.0
    left: list[float] = field(default_factory=list)  # kept for the next step instead of sent


class WeightSample(msgspec.Struct, frozen=True):
    """Numbers of a parameter before and after the update, and of its gradient if it was sent."""

    name: str
    shape: list[int]  # of the whole
    before: list[float]
    gradient: list[float]
    after: list[float]
    rate: float  # of the optimizer; 0 if unknown


class Told(Line, frozen=True):
    """The numbers of each call in the first step of a variant, in the order of its FirstStep."""

    variant: str
    step: int
    calls: list[CallSample]
    weight: WeightSample | None
    shares: list[float | None]  # of the loss, per rank


class Reached(Line, frozen=True):
    """Progress of the timed steps: per variant the last step's seconds on this rank, the part in calls and waits (None
    if the variant marks none), and the last known loss."""

    steps: int
    step_seconds: dict[str, float]
    called_seconds: dict[str, float | None]
    losses: dict[str, float | None]
    sent_bytes: float | None  # by all sockets of this rank, since the last such record


class Noted(Line, frozen=True):
    """A line of this rank's log written by its mode."""

    heading: str
    text: str


class Expected(Line, frozen=True):
    """The checks that a complete run with these settings must contain."""

    claims: list[list[Any]]  # [variant, name, times, whether one rank or each must]


class Waived(Line, frozen=True):
    """An expected claim that this rank did not make because there was nothing to check, and why; a name with a final
    space stands for all that begin with it."""

    variant: str
    name: str
    why: str
    times: int = 1


class Lesson(Line, frozen=True):
    """The description of a mode; on rank 0."""

    idea: list[str]  # paragraphs
    variants: dict[str, str]  # each in a sentence
    predictions: list[list[str]]  # rows of variant, what, formula, value, calls


class Said(Line, frozen=True):
    """A sentence of the lesson for the report, under a heading such as "predict"."""

    heading: str
    text: str


class Check(Line, frozen=True):
    """A tested claim: it holds if `max_abs_diff <= tolerance` on every rank that wrote one."""

    variant: str  # "" if it belongs to no variant
    name: str
    max_abs_diff: float
    tolerance: float
    detail: str = ""  # what was observed, if the number does not say it
    control: str = ""  # what makes it fail: `LAB_BUG=<bug>`, or `tests/<file>::<test>`
    unit: str = ""  # of both, if they are not plain numbers: "epsilons of bfloat16"


class Comparison(Line, frozen=True):
    """Predicted and measured on one rank; decides like a check if `decides`."""

    variant: str
    name: str  # "wire bytes", "called bytes", "peak bytes", "bubble", ...
    unit: str
    predicted: float
    measured: float
    tolerance: float  # absolute, in `unit`
    formula: str = ""
    decides: bool = True
    control: str = ""  # as of a Check
    shown: str = ""  # why it is informational


class Losses(Line, frozen=True):
    """The loss of the global batch at each step; `variant` is "one process" for the dense run."""

    variant: str
    # None: before a resume, if no rank knew all shares of it.
    values: Sequence[float | None]

    @property
    def numbers(self) -> list[float]:
        """Return the losses, NaN if unknown."""
        return [math.nan if value is None else value for value in self.values]


class Steps(Line, frozen=True):
    """The timed pass of one variant on one rank, one value per step without warm-up."""

    variant: str
    step_seconds: list[float]
    cpu_seconds: list[float]


class Called(Line, frozen=True):
    """Bytes and calls of one operation on one axis per step: tensor bytes times the operation's algorithmic factor."""

    variant: str
    op: str
    axis: str
    calls: float
    raw_bytes: float
    called_bytes: float


class Wire(Line, frozen=True):
    """Bytes per step that this rank's sockets sent to `peer`, without retransmits, which are separate."""

    variant: str
    peer: int
    sent_bytes: float
    retransmitted_bytes: float


class Memory(Line, frozen=True):
    """Bytes of one variant on this rank at the peak of its memory pass, with its construction and what existed
    before."""

    variant: str
    peak_bytes: int


class Classes(Line, frozen=True):
    """Bytes of one variant on this rank by class: between two steps, and at the counted step's peak."""

    variant: str
    rest_bytes: dict[str, int]  # parameters, gradients, optimizer, activations, communication
    peak_bytes: dict[str, int]


class MemoryLine(Line, frozen=True):
    """Bytes by class over the counted step: for each of many equal parts, those at its peak."""

    variant: str
    step_s: float  # longer than a timed step, because of the counting
    held_bytes: dict[str, list[int]]


class Activations(Line, frozen=True):
    """The most bytes that this rank kept for the backward pass of one variant."""

    variant: str
    peak_bytes: int


class Clock(Line, frozen=True):
    """The offset from this rank's perf_counter to rank 0's, and its uncertainty."""

    offset_s: float
    uncertainty_s: float


class Timeline(Line, frozen=True):
    """One recorded step of a variant on this rank, on rank 0's clock; 0 is the earliest start of any rank."""

    variant: str
    step: int
    spans: list[list[Any]]  # each a Span, by end; they may nest

    INSIDE = {"spans": list[Span]}


class Messages(Line, frozen=True):
    """This rank's calls in the step of its timeline, on the same clock."""

    variant: str
    calls: list[list[Any]]  # each a Call, by start

    INSIDE = {"calls": list[Call]}


class Ideal(Line, frozen=True):
    """A variant's step by its schedule, if messages took no time: each rank's spans; on rank 0."""

    variant: str
    spans: list[list[list[Any]]]  # of each rank

    INSIDE = {"spans": list[list[Span]]}


class Profile(Line, frozen=True):
    """Time of a step on this rank: median seconds by class; each moment counts for the innermost class."""

    variant: str
    seconds: dict[str, float]  # data, forward, backward, communication, optimizer, waiting


class Overlap(Line, frozen=True):
    """From older runs: communication time of a profiled step, and the part during which this rank's backward pass
    computed."""

    variant: str
    communication_s: float
    hidden_s: float


class Resumed(Line, frozen=True):
    """The step from which a stopped run continues; on rank 0."""

    epoch: int
    step: int
    path: str  # of the checkpoint


class Saved(Line, frozen=True):
    """A checkpoint, or why there is none; on rank 0."""

    step: int  # number of finished steps
    seconds: float  # until it was complete
    held_s: float  # the part during which training waited
    num_bytes: int
    error: str = ""


class Digest(Line, frozen=True):
    """The sha256 of all final weights of a variant, to compare two runs to the bit; on rank 0."""

    variant: str
    sha256: str


class Skipped(Line, frozen=True):
    """A variant that cannot run with these sizes, and why."""

    variant: str
    reason: str


class Table(Line, frozen=True):
    """A table of the mode; cells are text or numbers."""

    title: str
    columns: list[str]
    rows: list[list[Any]]  # each cell a Scalar

    INSIDE = {"rows": list[list[Scalar]]}


class Chart(Line, frozen=True):
    """A line chart of the mode."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[Any]]  # each Axes
    log_x: bool = False
    log_y: bool = False

    INSIDE = {"series": dict[str, Axes]}


class Finding(Line, frozen=True):
    """A fault in a checked script: an actionable sentence, and the ranks; on rank 0."""

    check: str
    sentence: str
    ranks: list[int]


class Dropped(Line, frozen=True):
    """Rejected messages on this rank: counted by fault and by source address."""

    by_fault: dict[str, int]
    by_source: dict[str, int]


class Corrupted(Line, frozen=True):
    """A tensor that must be equal on some ranks and differed, the first of an audit; on rank 0."""

    variant: str
    step: int
    tensor: str  # "gradients.<parameter>" or "weights.<parameter>"
    ranks: list[int]  # by majority the odd ones, else all that have it
    majority: bool
    others: int  # tensors that differed in the same audit


class Planned(Line, frozen=True):
    """A fault planned by LAB_FAULTS, and its expected effect; on every rank."""

    number: int
    event: str  # in words: "kill rank 2 at step 5"
    kind: str
    rank: int
    outcome: str  # the expected effect, as distlab/lab/report/fault_checks.py names it
    bound_s: float  # the limit for it
    step: int | None = None
    checks: list[str] = field(
        default_factory=list
    )  # checks of the mode that detect a flipped bit; none: those of the timed steps


class Injected(Line, frozen=True):
    """An injected fault, written by its rank just before."""

    number: int
    rank: int
    step: int
    variant: str
    at: float  # Unix time, in seconds
    detail: str = ""  # a flipped bit's tensor and numbers; a checkpoint's file
    outcome: str = ""  # if not the planned one: "named" if other ranks have a copy


class Refused(Line, frozen=True):
    """The error of a checkpoint that a fault test damaged, when opened as for a resume."""

    number: int
    sentence: str


class Stood(Line, frozen=True):
    """Times when steps of a variant were valid on this rank, in Unix time; only in older runs, not used."""

    variant: str
    at: list[float]


class Changed(Line, frozen=True):
    """A change of an elastic run's members from a step on, as one remaining member recorded it."""

    variant: str
    step: int
    at: float  # Unix time of its detection
    what: str  # "lost", "asked" to join, or all "restart"
    members: list[int]  # from then on


class Unshared(Line, frozen=True):
    """The machines share no disk, so each has only its own ranks' files: the host of every rank."""

    hosts: list[str]


class Lost(Line, frozen=True):
    """A lost rank, as the survivors agreed."""

    rank: int
    step: int
    reason: str


class Left(Line, frozen=True):
    """A rank that has gone while the others continued; recorded by one of them."""

    rank: int
    step: int
    reason: str
    back: bool = False  # it was restarted and rejoined


class Failed(Line, frozen=True):
    """An error that ended this rank's run: exit code and sentence."""

    exit_code: int
    error: str
    at: float = 0.0  # Unix time, in seconds


class End(Line, frozen=True):
    """The last record of a rank that finished; Unix times, in seconds."""

    rank: int
    started_at: float  # the start of the rank's program, before torch is imported
    first_step_at: float | None  # the end of the first training step; None in a mode without training
    ended_at: float
    watch_cpu_s: float  # total CPU time of the heartbeats


class Load(Line, frozen=True):
    """The load of this rank's machine at the run's start or end; None if the system does not report it."""

    moment: str  # "start" or "end"
    machine: str  # the kernel's boot id, equal in all containers of one machine
    cores: int  # available to the rank
    processor: str
    load_average: float | None  # of the last minute
    runnable: int | None  # runnable threads of the machine, without the rank's own
    cpu_pressure: float | None  # share of ten seconds in which some thread waited for a core
    at: float  # Unix time, in seconds


if TYPE_CHECKING:
    Record: TypeAlias = Line
else:
    Record = Union[tuple(Line.__subclasses__())]  # noqa: UP007
Kind = TypeVar("Kind", bound=Line)
Ranks = dict[int, list[Record]]  # the records of each rank of a run
Run = dict[str, Any]  # run.json, or an entry in one of its lists


def select(records: Ranks, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
    """Yield all records of one kind with their rank, lowest rank first."""
    for rank in sorted(records):
        for record in records[rank]:
            if isinstance(record, kind):
                yield rank, record
