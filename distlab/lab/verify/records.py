"""The recorded steps: what each rank does when, and every message between them, on one clock.

Three steps of each variant after the timed ones, with the marks of the phases and a kernel that notes each call
(distlab/lab/measure/traffic.py), which the timed steps do without; of these the one of median length is drawn.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median, median_low
from typing import Any, NamedTuple, TypeAlias

from distlab.contract import Counted, Strategy
from distlab.lab.checkpoint.manifest import TrainingPosition
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Message, Messages
from distlab.lab.measure.prediction import PYTORCHS
from distlab.lab.measure.timeline import Clock, align, bubble, profile
from distlab.lab.report import records
from distlab.lab.report.tables import DRAWN, ON_WIRE
from distlab.lab.report.units import counted, human_bytes, milliseconds, name_ranks
from distlab.lab.verify.counted import alike, repeats_after
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.costs import gloo_all_reduce_messages, wire_tolerance
from distlab.techniques.collectives.phases import COMPUTE, Span, listening, phase, recorded, slowed

# Marks are cheap enough to stay in for the timed steps (distlab/techniques/collectives/phases.py), so where a rank's
# time went and the bubble, the median of all that were kept, are of the very steps whose time is reported.

KEPT_STEPS = 20  # of a long run the last ones: what goes to rank 0 does not grow with LAB_STEPS

Bounds = list[Any]  # of a step on one rank: [start_s, end_s, [[kind, start_s, end_s] of each forward and backward]]


class Chronicle:
    """The marks of each variant's last timed steps on this rank."""

    def __init__(self, variants: Sequence[str]) -> None:
        self.steps: dict[str, deque[tuple[int, list[Span]]]] = {name: deque(maxlen=KEPT_STEPS) for name in variants}

    def add(self, variant: str, step: int, spans: list[Span]) -> None:
        """Note what ran in `step`; all ranks note the same steps."""
        self.steps[variant].append((step, spans))

    def profile(self, variant: str) -> dict[str, float]:
        profiles = [profile(spans) for _, spans in self.steps[variant]]
        return {kind: median(each[kind] for each in profiles) for kind in profiles[0]}

    def bubbles(self, lab: Lab, clock: Clock) -> dict[str, float | None]:
        mine = {name: [bounds(spans, clock.offset_s)[2] for _, spans in steps] for name, steps in self.steps.items()}
        everyone = lab.exchange.gather("spans", mine)
        return {} if everyone is None else bubbles(everyone)


def in_step(spans: list[Span]) -> list[Span]:
    """Without the fetching of data, after which ranks wait for each other before the step begins."""
    return [span for span in spans if span.kind != "data"]


def bounds(spans: list[Span], offset_s: float) -> Bounds:
    """When a step began and ended on this rank, and its passes, on rank 0's clock."""
    inside = in_step(spans)
    passes = [[span.kind, span.start_s + offset_s, span.end_s + offset_s] for span in inside if span.kind in COMPUTE]
    return [min(span.start_s for span in inside) + offset_s, max(span.end_s for span in inside) + offset_s, passes]


def placed(span: Span, shift_s: float) -> list[Any]:
    return [span.kind, span.label, round(span.start_s + shift_s, 6), round(span.end_s + shift_s, 6)]


def bubbles(everyone: list[dict[str, list[list[list[Any]]]]]) -> dict[str, float | None]:
    """The median bubble of each variant; of all ranks [kind, start_s, end_s] of the passes of each step in."""
    found: dict[str, float | None] = {}
    for name in everyone[0]:
        steps = zip(*(of_rank[name] for of_rank in everyone), strict=True)
        values = [
            bubble([[(kind, "", start, end) for kind, start, end in passes] for passes in step]) for step in steps
        ]
        known = [value for value in values if value is not None]
        found[name] = median(known) if known else None
    return found


RECORDED_STEPS = 3
AS_PRICED = {"send", "recv", "all_reduce", "all_gather", "all_to_all"}  # operations of which gloo sends what is least
CONTROL = "tests/lab/verify/test_records.py::test_a_message_that_is_not_drawn_is_seen"


class Drawn(NamedTuple):
    """What this rank sends in what is drawn."""

    nbytes: float
    messages: float  # of gloo, or receives where these are more
    ops: frozenset[str] = frozenset()
    alike: bool = True  # whether its steps send the same

    def per(self, steps: int) -> "Drawn":
        return self._replace(nbytes=self.nbytes / steps, messages=self.messages / steps)


Recorded: TypeAlias = tuple[int, list[Span], list[Message]]  # one step on this rank, by its number
Prepare: TypeAlias = Callable[[int], Callable[[], object]]  # of a step's number what makes it


def record(lab: Lab, strategies: Mapping[str, Strategy], course: TrainingPosition) -> dict[str, Drawn]:
    """Record a step of each variant that is trained; returns what this rank sends a step in what is drawn.

    Of a strategy whose steps are not alike as many are one, and drawn together, as it takes until they repeat.
    """

    def prepared(strategy: Strategy, number: int) -> Callable[[], object]:
        first, together = lab.config.steps + number, repeats_after(strategy)
        steps = [lab.dealt(course.batches, course.data_step(first + step)) for step in range(together)]
        return partial(train, strategy, steps)

    drawn = draw(lab, {name: partial(prepared, strategy) for name, strategy in strategies.items()})
    return {
        name: sent.per(repeats_after(strategies[name]))._replace(alike=alike(strategies[name]))
        for name, sent in drawn.items()
    }


def train(strategy: Strategy, steps: list[list[Microbatch]]) -> None:
    for microbatches in steps:
        strategy.backward(microbatches)
        with phase("optimizer"):
            strategy.update()


def draw(lab: Lab, steps: Mapping[str, Prepare]) -> dict[str, Drawn]:
    """Write a timeline and the messages of each; returns what this rank sends in what is drawn."""
    clock = align(lab.group)
    taken = {
        name: [one(lab, name, prepare, number) for number in range(RECORDED_STEPS)] for name, prepare in steps.items()
    }
    mine = {name: [bounds(spans, clock.offset_s)[:2] for _, spans, _ in of] for name, of in taken.items()}
    everyone = lab.exchange.gather("recorded steps", mine)
    chosen = {} if everyone is None else {name: median_step([of[name] for of in everyone]) for name in taken}
    drawn = {}
    for name, (index, origin_s) in lab.exchange.share("drawn steps", chosen).items():
        step, spans, messages = taken[name][index]
        shift_s = clock.offset_s - origin_s
        lab.journal.write(records.Timeline(name, step, [placed(span, shift_s) for span in in_step(spans)]))
        lab.journal.write(records.Messages(name, [written(message, shift_s) for message in messages]))
        drawn[name] = Drawn(
            sum(message.sent_bytes for message in messages),
            number_of(messages),
            frozenset(each.op for each in messages),
        )
    return drawn


def one(lab: Lab, name: str, prepare: Prepare, number: int) -> Recorded:
    make, messages = prepare(number), Messages()
    lab.exchange.barrier(f"recorded step {number} of {name}")
    lab.at(lab.config.steps, f"recorded step {number} of {name}")
    with messages.recorded(), listening(messages.hear), recorded(lab.device) as spans, slowed(lab.config.slowed_to):
        make()
    lab.work.advance()
    return lab.config.steps + number, spans, messages.found


def median_step(of_ranks: list[list[list[float]]]) -> tuple[int, float]:
    """The index and the start of the step of median length; each rank's starts and ends in."""
    steps = list(zip(*of_ranks, strict=True))
    lengths = [max(end for _, end in step) - min(start for start, _ in step) for step in steps]
    index = lengths.index(median_low(lengths))
    return index, min(start for start, _ in steps[index])


def written(message: Message, shift_s: float) -> list[object]:
    start_s, end_s = round(message.start_s + shift_s, 6), round(message.end_s + shift_s, 6)
    return [message.op, list(message.ranks), round(message.sent_bytes), message.nbytes, message.tag, start_s, end_s]


def number_of(messages: list[Message]) -> int:
    """Messages on the wire: of sends or receives what is more, of collectives gloo's."""
    ways = [sum(message.op == op for message in messages) for op in ("send", "recv")]
    return max(ways) + sum(gloo_messages(message) for message in messages if message.op not in ("send", "recv"))


def gloo_messages(message: Message) -> int:
    if message.op in ("all_reduce", "reduce_scatter"):
        return gloo_all_reduce_messages(len(message.ranks), message.nbytes)
    return (len(message.ranks) - 1) * (1 if message.op == "all_to_all" else 2)


def compare_drawn(lab: Lab, drawn: Mapping[str, Drawn], counted: Mapping[str, Counted]) -> None:
    """The picture is of all that is sent: as many bytes as the ledger saw called, and as the sockets counted.

    Within 1 %, and gloo's frames on the wire. Of PyTorch's own that is only shown: what its hooks call on gloo's
    thread, ddp_powersgd's second factor, the ledger does not see. So is that of a strategy whose steps are never alike,
    as one's own may not be; and on the wire what has an operation that gloo sends otherwise, as reduce_scatter twice.
    """
    for name, sent in drawn.items():
        traffic, shown = counted[name].traffic, PYTORCHS if name in lab.mode.by_torch else ""
        if is_own(name):
            shown = "your own: its steps may not be alike"
        if not sent.alike:
            shown = shown or "no two of its steps send the same"
        hold_drawn(lab, name, traffic.called_bytes, sent.nbytes, "bytes as called", shown)
        if traffic.wire_error is None:
            tolerance = wire_tolerance(sent.nbytes, sent.messages)
            other = ", ".join(sorted(sent.ops - AS_PRICED))
            shown = shown or (f"gloo has its own way of {other}" if other else "")
            wanted, on_wire = lab.of_ranks(f"the wire as drawn of {name}", sent.nbytes, traffic.wire_bytes)
            lab.compare(
                ON_WIRE, wanted, on_wire, "B", tolerance, name, "bytes as drawn", shown=shown,
                control=CONTROL,
            )  # fmt: skip


def hold_drawn(lab: Lab, variant: str, wanted: float, drawn: float, formula: str, shown: str = "") -> None:
    """What is drawn of a variant is as many bytes as are `wanted`, within 1 %."""
    lab.compare(DRAWN, wanted, drawn, "B", 0.01 * wanted, variant, formula, shown=shown, control=CONTROL)


def note_messages(lab: Lab, predicted_bytes: Mapping[str, float]) -> None:
    """In each rank's log: of each collective that is drawn its messages, to whom, how long it took, and how many bytes
    were predicted."""
    written = lab.journal.records
    spans = {each.variant: each.spans for each in written if isinstance(each, records.Timeline)}
    for each in [each for each in written if isinstance(each, records.Messages)]:
        sends = [call for call in each.calls if call[0] == "send"]
        whom = f" to {name_ranks({call[1][1] for call in sends})}" if sends else ""
        took_ms = milliseconds(max((span[3] for span in spans[each.variant]), default=0.0))
        sent = human_bytes(sum(call[2] for call in each.calls))
        calls = counted(len(sends) or len(each.calls), "messages")
        told = f"{took_ms} ms: {calls}{whom}, {sent}; predicted {human_bytes(predicted_bytes[each.variant])}"
        lab.note(each.variant, told)
