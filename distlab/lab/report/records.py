"""What a rank writes down: one record a line in `rank<r>.jsonl`, and nothing that could be computed from others.

Records are the only bridge between a run and its report: `verdict.py` reads nothing else, so that a finished run can be
judged again. Lengths of bytes and seconds carry their unit in the field's name.
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
# What the rows of some records have to be, which are lists as JSON has no tuples.
Span = tuple[str, str, float, float]  # [kind, label, start_s, end_s]
# [operation, ranks, bytes that this rank sends, bytes of its tensors, tag, start_s, end_s]; the ranks of a send or
# receive are from whom to whom.
Call = tuple[str, list[int], float, float, int | None, float, float]
Axes = tuple[list[float | None], list[float | None]]  # [x values, y values]
# [parameter, shape of what this rank has of it, shape of the whole, first and last index of each of its boxes along the
# first axis that is cut, bytes]
HeldParameter = tuple[str, list[int], list[int], list[list[int]], int]
# A Call, the tensors that it carries in words, and how long this rank waited in it for which one; -1 for nobody.
FirstCall = tuple[str, list[int], float, float, int | None, float, float, str, float, int]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="record", tag=str.lower):
    """A record: in its file it has the name of its type under "record"."""

    INSIDE: ClassVar[Mapping[str, Any]] = {}  # of fields that are declared as lists or mappings: of what exactly

    def __post_init__(self) -> None:
        for name, kind in self.INSIDE.items():
            msgspec.convert(getattr(self, name), kind)


class Start(Line, frozen=True):
    """The first record of a rank: who it is and with what it runs."""

    rank: int
    run_id: str
    run_mode: str
    world_size: WorldSize
    host: str
    config: dict[str, Any]  # by variable name, each a Setting
    repeat: dict[str, str]  # only those that were set: what repeats the run
    versions: dict[str, str]  # python, torch, lab (hash of the sources), ...
    title: str = ""  # what is run, for a heading: "gpt, 1.6M parameters"
    by_torch: list[str] = field(default_factory=list)  # the variants that are PyTorch's own
    mistake: dict[str, str] = field(default_factory=dict)  # that LAB_BUG makes: name, what, check; empty without one
    says_claims: bool = False  # whether an Expected follows; False in the records of a lab that had none
    idea: str = ""  # of the mode, in a sentence
    stories: dict[str, str] = field(default_factory=dict)  # what a rank does in each variant
    started_by: str = ""  # the command that started the ranks, such as ./run; empty in records of before

    INSIDE = {"config": dict[str, Setting]}


class Placed(Line, frozen=True):
    """Where this rank is: its address, its device, its place along each axis of the mesh, and who is next to it."""

    ip: str
    device: str
    axes: dict[str, list[int]]  # by name [its index, the ranks along it]
    neighbours: dict[str, int]  # "previous stage": rank


class Given(Line, frozen=True):
    """What this rank works on in a step: the samples of the global batch by number, and how it takes them."""

    step: int
    samples: list[int]
    batch: int  # samples of all ranks
    microbatches: list[int]  # samples of each


class Holds(Line, frozen=True):
    """The parameters of a variant that this rank has, whole or in part."""

    variant: str
    parameters: list[list[Any]]  # each a HeldParameter

    INSIDE = {"parameters": list[HeldParameter]}


class FirstStep(Line, frozen=True):
    """The first step of a variant on this rank: its spans and its calls, in seconds since the first rank began it, on
    rank 0's clock."""

    variant: str
    step: int
    seconds: dict[str, float]  # by class, as in a Profile
    spans: list[list[Any]]  # each a Span
    calls: list[list[Any]]  # each a FirstCall, in the order of their starts

    INSIDE = {"spans": list[Span], "calls": list[FirstCall]}


class CallSample(msgspec.Struct, frozen=True):
    """What one call of a told step carried, or a collective by hand: numbers from one place on, before and after."""

    op: str
    ranks: list[int]  # of the group; of a send or receive from whom to whom
    calls: list[int]  # of the FirstStep, which it is made of
    label: str  # of the phase that it is made in, such as "unit 1"
    parameters: list[str]  # those that it carries, or whose gradients
    shape: list[int]  # of what goes in
    inside: str  # the module in whose pass it is made: "1.attention"
    backward: bool
    at_once: bool  # whether it was waited for before anything else happened
    wait_s: list[float]  # when the wait for it began and ended; empty where nothing waited for it by itself
    tensor: str  # the parameter in which the numbers are; empty of what has no name
    given: list[float]
    taken: list[float]
    of_ranks: list[tuple[int, float]]  # each rank, and its first number
    start_s: float = 0.0
    left: list[float] = field(default_factory=list)  # what was not sent, and is kept for the next step


class WeightSample(msgspec.Struct, frozen=True):
    """Numbers of a parameter before and after the update, and of its gradient where that was sent."""

    name: str
    shape: list[int]  # of the whole
    before: list[float]
    gradient: list[float]
    after: list[float]
    rate: float  # of the optimizer; 0 where that is not known


class Told(Line, frozen=True):
    """What makes a story of the first step of a variant: the numbers of each of its calls, in the order of those of its
    FirstStep."""

    variant: str
    step: int
    calls: list[CallSample]
    weight: WeightSample | None
    shares: list[float | None]  # of the loss, of each rank


class Reached(Line, frozen=True):
    """How far the timed steps are: of each variant the last step's seconds on this rank, those of them in calls and
    waiting (None where a variant marks none), and the last loss that is known."""

    steps: int
    step_seconds: dict[str, float]
    called_seconds: dict[str, float | None]
    losses: dict[str, float | None]
    sent_bytes: float | None  # by all sockets of this rank, since the record before


class Noted(Line, frozen=True):
    """A line of this rank's own log that only its mode can write."""

    heading: str
    text: str


class Expected(Line, frozen=True):
    """The checks and comparisons that a run of these settings has to have made, by whoever comes through to its end."""

    claims: list[list[Any]]  # [variant, name, times, whether one rank has to, or each]


class Waived(Line, frozen=True):
    """An expected claim that this rank did not make since there was nothing to hold, and why; a name that ends
    in a space stands for all that begin so."""

    variant: str
    name: str
    why: str
    times: int = 1


class Lesson(Line, frozen=True):
    """What a mode is about; on rank 0."""

    idea: list[str]  # paragraphs
    variants: dict[str, str]  # each in a sentence
    predictions: list[list[str]]  # rows of variant, what, formula, value, calls


class Said(Line, frozen=True):
    """A sentence of the lesson that belongs into the report, under a heading such as "predict"."""

    heading: str
    text: str


class Check(Line, frozen=True):
    """A claim that was tested: it holds if `max_abs_diff <= tolerance` on every rank that wrote one."""

    variant: str  # "" where a check belongs to no variant
    name: str
    max_abs_diff: float
    tolerance: float
    detail: str = ""  # what was seen, where the number alone does not say it
    control: str = ""  # what makes it fail: `LAB_BUG=<mistake>`, or `tests/<file>::<test>`
    unit: str = ""  # of both, where they are no plain numbers: "epsilons of bfloat16"


class Comparison(Line, frozen=True):
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


class Losses(Line, frozen=True):
    """The loss of the global batch at each step; `variant` is "one process" for the dense run."""

    variant: str
    # None: of before a resume, and no rank knew all shares of it.
    values: Sequence[float | None]

    @property
    def numbers(self) -> list[float]:
        """NaN where it is not known."""
        return [math.nan if value is None else value for value in self.values]


class Steps(Line, frozen=True):
    """The timed pass of one variant on one rank, a value a step, warm-up dropped."""

    variant: str
    step_seconds: list[float]
    cpu_seconds: list[float]


class Called(Line, frozen=True):
    """Bytes and calls of one operation on one axis, a step: tensor bytes times the operation's algorithmic factor."""

    variant: str
    op: str
    axis: str
    calls: float
    raw_bytes: float
    called_bytes: float


class Wire(Line, frozen=True):
    """Bytes a step that this rank's sockets sent to `peer`, first transmissions alone; retransmits stand apart."""

    variant: str
    peer: int
    sent_bytes: float
    retransmitted_bytes: float


class Memory(Line, frozen=True):
    """Bytes held by one variant on this rank at the peak of its memory pass, its making and what was there before
    included."""

    variant: str
    peak_bytes: int


class Classes(Line, frozen=True):
    """Bytes that one variant held on this rank by class: between two steps, and when the counted step held most."""

    variant: str
    rest_bytes: dict[str, int]  # parameters, gradients, optimizer, activations, communication
    peak_bytes: dict[str, int]


class MemoryLine(Line, frozen=True):
    """Bytes by class over the counted step: of each of many equal parts of it those at the part's own peak."""

    variant: str
    step_s: float  # longer than a timed step: it is counted meanwhile
    held_bytes: dict[str, list[int]]


class Activations(Line, frozen=True):
    """The most bytes that this rank held for the backward pass of one variant."""

    variant: str
    peak_bytes: int


class Clock(Line, frozen=True):
    """What this rank's perf_counter must be given to read as rank 0's, and how far off that may be."""

    offset_s: float
    uncertainty_s: float


class Timeline(Line, frozen=True):
    """One recorded step of a variant on this rank, on rank 0's clock; 0 is the earliest start of all ranks in that
    step."""

    variant: str
    step: int
    spans: list[list[Any]]  # each a Span, in the order of their ends; they may nest

    INSIDE = {"spans": list[Span]}


class Messages(Line, frozen=True):
    """What this rank called in the step of its timeline, on the same clock."""

    variant: str
    calls: list[list[Any]]  # each a Call, in the order of their starts

    INSIDE = {"calls": list[Call]}


class Ideal(Line, frozen=True):
    """The step as the schedule of a variant has it, if no message took time: each rank's spans; on rank 0."""

    variant: str
    spans: list[list[list[Any]]]  # of each rank

    INSIDE = {"spans": list[list[Span]]}


class Profile(Line, frozen=True):
    """Where the time of a step went on this rank: median seconds by class, each moment in the innermost class alone."""

    variant: str
    seconds: dict[str, float]  # data, forward, backward, communication, optimizer, waiting


class Overlap(Line, frozen=True):
    """Of a step under a profiler, which an older run may have: time in communication, and how much of it this rank's
    backward pass computed meanwhile."""

    variant: str
    communication_s: float
    hidden_s: float


class Resumed(Line, frozen=True):
    """Where a run goes on that was stopped before; on rank 0."""

    epoch: int
    step: int
    path: str  # of the checkpoint


class Saved(Line, frozen=True):
    """A checkpoint, or why there is none; on rank 0."""

    step: int  # how many steps are done
    seconds: float  # until it was complete
    held_s: float  # of these the training stood still
    num_bytes: int
    error: str = ""


class Digest(Line, frozen=True):
    """The sha256 of all final weights of a variant, by which two runs are compared to the bit; on rank 0."""

    variant: str
    sha256: str


class Skipped(Line, frozen=True):
    """A variant that cannot take these sizes, and why."""

    variant: str
    reason: str


class Table(Line, frozen=True):
    """A table of the lesson's own; cells are text or numbers."""

    title: str
    columns: list[str]
    rows: list[list[Any]]  # each cell a Scalar

    INSIDE = {"rows": list[list[Scalar]]}


class Chart(Line, frozen=True):
    """A line chart of the lesson's own."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[Any]]  # each Axes
    log_x: bool = False
    log_y: bool = False

    INSIDE = {"series": dict[str, Axes]}


class Finding(Line, frozen=True):
    """What is wrong with a script that was checked: a sentence that can be acted on, and whose it is; on rank 0."""

    check: str
    sentence: str
    ranks: list[int]


class Dropped(Line, frozen=True):
    """The messages that came to this rank and were not believed: counted by what was wrong, and by whose address."""

    by_fault: dict[str, int]
    by_source: dict[str, int]


class Corrupted(Line, frozen=True):
    """A tensor of a variant that ranks held alike and that differed, the first of an audit; on rank 0."""

    variant: str
    step: int
    tensor: str  # "gradients.<parameter>" or "weights.<parameter>"
    ranks: list[int]  # by majority the odd ones, else all that hold it
    majority: bool
    others: int  # tensors that differed in the same audit


class Planned(Line, frozen=True):
    """A fault that LAB_FAULTS plans: what it is, and what should come of it; on every rank."""

    number: int
    event: str  # in words: "kill rank 2 at step 5"
    kind: str
    rank: int
    outcome: str  # what should come of it, as distlab/lab/report/fault_checks.py names it
    bound_s: float  # within which
    step: int | None = None
    checks: list[str] = field(
        default_factory=list
    )  # of the mode, that see a flipped bit; none: those of the timed steps


class Injected(Line, frozen=True):
    """A planned fault that was made, by the rank that made it, just before."""

    number: int
    rank: int
    step: int
    variant: str
    at: float  # Unix time, in seconds
    detail: str = ""  # of a flipped bit the tensor and the numbers; of a checkpoint the file
    outcome: str = ""  # where it is another than was planned: "named" where other ranks hold a copy


class Refused(Line, frozen=True):
    """What was said of a checkpoint that a drill had damaged, by a look such as a resumed run takes."""

    number: int
    sentence: str


class Stood(Line, frozen=True):
    """When steps of a variant stood on this rank, in Unix times; runs of before have it, and nobody reads it."""

    variant: str
    at: list[float]


class Changed(Line, frozen=True):
    """The members of a run whose ranks come and go are others from a step on, as one that went on saw it."""

    variant: str
    step: int
    at: float  # Unix time: it noticed
    what: str  # "lost", "asked" to be let in, or all "restart"
    members: list[int]  # from then on


class Unshared(Line, frozen=True):
    """The machines share no disk, so each holds what its own ranks write: the host of every rank."""

    hosts: list[str]


class Lost(Line, frozen=True):
    """A rank that is gone, as the survivors agreed."""

    rank: int
    step: int
    reason: str


class Left(Line, frozen=True):
    """A rank that is gone, and that the others went on without; the words of one of them."""

    rank: int
    step: int
    reason: str
    back: bool = False  # it was started again, and found its way back


class Failed(Line, frozen=True):
    """An error that ended this rank's run: its exit code and its sentence."""

    exit_code: int
    error: str
    at: float = 0.0  # Unix time, in seconds


class End(Line, frozen=True):
    """The last record of a rank that came through to the end; Unix times, in seconds."""

    rank: int
    started_at: float  # the rank's program began, torch not yet imported
    first_step_at: float | None  # the first step of a strategy was done; None in a mode that trains nothing
    ended_at: float
    watch_cpu_s: float  # what the heartbeats took of a core in all


class Load(Line, frozen=True):
    """What this rank's machine had to do as the run began or ended; None where the system does not tell."""

    moment: str  # "start" or "end"
    machine: str  # the kernel's own number for this boot: containers of one machine have it in common
    cores: int  # that the rank may run on
    processor: str
    load_average: float | None  # of the last minute
    runnable: int | None  # threads of the machine that run or could, the rank itself left out
    cpu_pressure: float | None  # the share of ten seconds in which some thread waited for a core
    at: float  # Unix time, in seconds


if TYPE_CHECKING:
    Record: TypeAlias = Line
else:
    Record = Union[tuple(Line.__subclasses__())]  # noqa: UP007
Kind = TypeVar("Kind", bound=Line)
Ranks = dict[int, list[Record]]  # the records of each rank of a run
Run = dict[str, Any]  # run.json, or an entry in one of its lists


def select(records: Ranks, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
    """All records of one kind with their rank, lowest rank first."""
    for rank in sorted(records):
        for record in records[rank]:
            if isinstance(record, kind):
                yield rank, record
