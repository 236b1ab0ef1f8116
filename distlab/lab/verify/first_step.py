"""Data of each rank's log about the timed pass: its parameters and samples, and the calls of its first step.

The first step is in no median (distlab/lab/verify/timed.py), so it may be observed: each call, and how long this rank
waited in it for which rank; logged_step.py adds the contents. A collective ends when its last rank has entered, a
receive when its sender has sent: all ranks exchange the start times of their calls, on one clock.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from distlab.contract import Strategy
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Messages
from distlab.lab.measure.timeline import CLASSES, Clock, profile, union
from distlab.lab.report import records
from distlab.lab.verify.logged_step import LoggedStep, keys_of, parts_of_storages, piece_of, weights_of, write_numbers
from distlab.lab.verify.records import placed
from distlab.lab.workload.data import Batches
from distlab.techniques.collectives.phases import Span, listening, observing_collectives

NO_RANK = -1
IN_CALLS = ("communication", "waiting")  # classes of time without work of this rank's own

# --- parameters and samples ---


def write_parameters(lab: Lab, strategies: Mapping[str, Strategy]) -> None:
    """Write the parameters of each variant that this rank has, whole or in part; called after a step, since reading an
    optimizer's state would create it."""
    for name, strategy in strategies.items():
        rows = [parameter_record(label, tensor) for label, tensor in weights_of(strategy)]
        lab.journal.write(records.Holds(name, [list(row) for row in rows if row[4]]))


def parameter_record(name: str, tensor: Any) -> records.ParameterRow:
    """Return a record of the tensor; the first axis along which its boxes are shorter than the whole is the cut one."""
    piece = piece_of(tensor)
    dense, boxes = list(piece.shape), piece.boxes
    nbytes = sum(box.numel() * box.element_size() for _, box in boxes)
    cut = next((axis for axis, size in enumerate(dense) if any(box.shape[axis] < size for _, box in boxes)), None)
    ends = [] if cut is None else [[offset[cut], offset[cut] + box.shape[cut] - 1] for offset, box in boxes]
    shape = (
        [ends[-1][1] - ends[0][0] + 1 if axis == cut else size for axis, size in enumerate(dense)] if ends else dense
    )
    if len(boxes) == 1:
        shape = list(boxes[0][1].shape)
    return name, shape, dense, ends, nbytes


def write_inputs(lab: Lab, batches: Batches, step: int) -> None:
    """Write this rank's samples of `step`."""
    ids = batches.sample_ids(step, lab.mesh.index("dp"), lab.mesh.size("dp"))
    microbatches = batches.microbatches(step, lab.mesh.index("dp"), lab.mesh.size("dp"))
    lab.journal.write(records.Given(step, ids, batches.batch, [len(each.inputs) for each in microbatches]))


# --- the first step ---


class ObservedStep(NamedTuple):
    """What is recorded of a logged step: its calls, and their contents."""

    messages: Messages
    logged: LoggedStep


@contextmanager
def observed_calls(strategy: Strategy, *, enabled: bool) -> Iterator[ObservedStep | None]:
    """Record a step's calls and their numbers, if `enabled`."""
    if not enabled:
        yield None
        return
    logged = LoggedStep(strategy)
    samples, messages = logged.samples, Messages(logged.samples)

    def on_phase(what: str, kind: str, label: str) -> None:
        messages.on_phase(what, kind, label)
        logged.on_phase(what, kind)

    with samples.watched(), observing_collectives(samples.by_hand), messages.recorded(), listening(on_phase):
        yield ObservedStep(messages, logged)


def write_first_step(
    lab: Lab, name: str, step: int, strategy: Strategy, spans: Sequence[Span], observed: ObservedStep, clock: Clock,
    loss_part: float | None,
) -> None:  # fmt: skip
    """Write this rank's step, with the ranks it waited for; all ranks call it together."""
    messages, logged = observed
    inside = [span for span in spans if span.kind != "data"]
    began_s = min((span.start_s for span in inside), default=0.0) + clock.offset_s
    calls = [[each.op, list(each.ranks), each.tag, each.start_s + clock.offset_s] for each in messages.found]
    everyone = lab.exchange.everyone(f"first step of {name}", [began_s, calls])
    shift_s = clock.offset_s - min(of_rank[0] for of_rank in everyone if of_rank is not None)
    of_ranks = [of_rank[1] if of_rank is not None else [] for of_rank in everyone]
    keys = [keys_of(each) for each in of_ranks]
    last = last_to_enter(of_ranks, keys, lab.rank)
    idle = union(span for span in inside if CLASSES[span.kind] in IN_CALLS)  # each moment counts for one call
    rows: list[list[Any]] = []
    for message, (rank, entered_s) in zip(messages.found, last, strict=True):
        idle, waited_s = without_interval(idle, message.start_s, min(entered_s - clock.offset_s, message.end_s))
        start_s, end_s = (round(each + shift_s, 6) for each in (message.start_s, message.end_s))
        rows.append([
            message.op, list(message.ranks), float(round(message.sent_bytes)), float(message.nbytes), message.tag,
            start_s, end_s, "", round(waited_s, 6), rank if waited_s > 0 else NO_RANK,
        ])  # fmt: skip
    marks = [placed(span, shift_s) for span in inside]
    lab.journal.write(records.FirstStep(name, step, profile(inside), marks, rows))
    write_numbers(lab, name, step, logged, loss_part, parts_of_storages(strategy), shift_s)


def last_to_enter(
    calls: Sequence[Sequence[Sequence[Any]]], keys: Sequence[Sequence[tuple[Any, ...]]], me: int
) -> list[tuple[int, float]]:
    """Return for each call of rank `me` the rank that entered it last, and when; `calls` are [op, ranks, tag, start_s]
    per rank, and `keys` their names."""
    starts = [
        {key: call[3] for key, call in zip(names, of_rank, strict=True)}
        for names, of_rank in zip(keys, calls, strict=True)
    ]
    found: list[tuple[int, float]] = []
    for key, (op, ranks, _, start_s) in zip(keys[me], calls[me], strict=True):
        others = [] if op == "send" else [ranks[0]] if op == "recv" else [rank for rank in ranks if rank != me]
        matching = ("send", *key[1:]) if op == "recv" else key
        entered = [(starts[rank][matching], rank) for rank in others if rank >= 0 and matching in starts[rank]]
        entered_s, rank = max([*entered, (start_s, me)])
        found.append((rank, entered_s))
    return found


def without_interval(
    moments: Iterable[tuple[float, float]], start_s: float, end_s: float
) -> tuple[list[tuple[float, float]], float]:
    """Return these intervals without the part between the two times, and the seconds removed."""
    left, seconds = list[tuple[float, float]](), 0.0
    for begin, end in moments:
        first, last = max(begin, start_s), min(end, end_s)
        if first >= last:
            left.append((begin, end))
            continue
        seconds += last - first
        left += [part for part in ((begin, first), (last, end)) if part[0] < part[1]]
    return left, seconds
