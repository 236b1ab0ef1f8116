"""The recorded steps: each rank's phases, and every message between ranks, on one clock.

Three steps of each variant after the timed ones are recorded with phase marks and a kernel that notes each call
(distlab/lab/measure/traffic.py), which the timed steps do not use; the one of median length is drawn.
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
from distlab.lab.verify.counted import ever_repeats, repeats_after
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.costs import gloo_all_reduce_messages, wire_tolerance
from distlab.techniques.collectives.phases import COMPUTE, Span, listening, phase, recorded, slowed

# Marks are cheap enough for the timed steps (distlab/techniques/collectives/phases.py), so times by class and bubbles
# are medians over the same steps whose time is reported.

KEPT_STEPS = 20  # the last ones of a long run: the data sent to rank 0 does not grow with LAB_STEPS

Bounds = list[Any]  # of a step on one rank: [start_s, end_s, [[kind, start_s, end_s] of each forward and backward]]


class Chronicle:
    """The marks of each variant's last timed steps on this rank."""

    def __init__(self, variants: Sequence[str]) -> None:
        self.steps: dict[str, deque[tuple[int, list[Span]]]] = {name: deque(maxlen=KEPT_STEPS) for name in variants}

    def add(self, variant: str, step: int, spans: list[Span]) -> None:
        """Record the spans of `step`; all ranks record the same steps."""
        self.steps[variant].append((step, spans))

    def profile(self, variant: str) -> dict[str, float]:
        profiles = [profile(spans) for _, spans in self.steps[variant]]
        return {kind: median(each[kind] for each in profiles) for kind in profiles[0]}

    def bubbles(self, lab: Lab, clock: Clock) -> dict[str, float | None]:
        mine = {name: [bounds(spans, clock.offset_s)[2] for _, spans in steps] for name, steps in self.steps.items()}
        everyone = lab.exchange.gather("spans", mine)
        return {} if everyone is None else bubbles(everyone)


def in_step(spans: list[Span]) -> list[Span]:
    """Return the spans without data loading, after which ranks wait for each other before the step begins."""
    return [span for span in spans if span.kind != "data"]


def bounds(spans: list[Span], offset_s: float) -> Bounds:
    """Return start, end and passes of a step on this rank, on rank 0's clock."""
    inside = in_step(spans)
    passes = [[span.kind, span.start_s + offset_s, span.end_s + offset_s] for span in inside if span.kind in COMPUTE]
    return [min(span.start_s for span in inside) + offset_s, max(span.end_s for span in inside) + offset_s, passes]


def placed(span: Span, shift_s: float) -> list[Any]:
    return [span.kind, span.label, round(span.start_s + shift_s, 6), round(span.end_s + shift_s, 6)]


def bubbles(everyone: list[dict[str, list[list[list[Any]]]]]) -> dict[str, float | None]:
    """Return the median bubble of each variant, from all ranks' [kind, start_s, end_s] of each step's passes."""
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
MINIMAL = {"send", "recv", "all_reduce", "all_gather", "all_to_all"}  # gloo sends the minimum of these operations
CONTROL = "tests/lab/verify/test_records.py::test_a_message_that_is_not_drawn_is_seen"


class Drawn(NamedTuple):
    """The bytes and messages that this rank sends in the drawn step."""

    nbytes: float
    messages: float  # of gloo, or receives if these are more
    ops: frozenset[str] = frozenset()
    repeats: bool = True  # whether its steps send equally

    def per(self, steps: int) -> "Drawn":
        return self._replace(nbytes=self.nbytes / steps, messages=self.messages / steps)


Recorded: TypeAlias = tuple[int, list[Span], list[Message]]  # one step on this rank, by its number
Prepare: TypeAlias = Callable[[int], Callable[[], object]]  # returns a function that runs the step of this number


def record(lab: Lab, strategies: Mapping[str, Strategy], position: TrainingPosition) -> dict[str, Drawn]:
    """Record a step of each trained variant; return what this rank sends per drawn step.

    If a strategy's steps differ, as many are recorded and drawn together as it takes until they repeat.
    """

    def prepared(strategy: Strategy, number: int) -> Callable[[], object]:
        first, together = lab.config.steps + number, repeats_after(strategy)
        steps = [lab.microbatches(position.batches, position.data_step(first + step)) for step in range(together)]
        return partial(train, strategy, steps)

    drawn = draw(lab, {name: partial(prepared, strategy) for name, strategy in strategies.items()})
    return {
        name: sent.per(repeats_after(strategies[name]))._replace(repeats=ever_repeats(strategies[name]))
        for name, sent in drawn.items()
    }


def train(strategy: Strategy, steps: list[list[Microbatch]]) -> None:
    for microbatches in steps:
        strategy.backward(microbatches)
        with phase("optimizer"):
            strategy.update()


def draw(lab: Lab, steps: Mapping[str, Prepare]) -> dict[str, Drawn]:
    """Write a timeline and the messages of each; return what this rank sends in the drawn steps."""
    clock = align(lab.group)
    by_variant = {
        name: [record_step(lab, name, prepare, number) for number in range(RECORDED_STEPS)]
        for name, prepare in steps.items()
    }
    mine = {name: [bounds(spans, clock.offset_s)[:2] for _, spans, _ in of] for name, of in by_variant.items()}
    everyone = lab.exchange.gather("recorded steps", mine)
    chosen = {} if everyone is None else {name: median_step([of[name] for of in everyone]) for name in by_variant}
    drawn = {}
    for name, (index, origin_s) in lab.exchange.share("drawn steps", chosen).items():
        step, spans, messages = by_variant[name][index]
        shift_s = clock.offset_s - origin_s
        lab.journal.write(records.Timeline(name, step, [placed(span, shift_s) for span in in_step(spans)]))
        lab.journal.write(records.Messages(name, [written(message, shift_s) for message in messages]))
        drawn[name] = Drawn(
            sum(message.sent_bytes for message in messages),
            count_messages(messages),
            frozenset(each.op for each in messages),
        )
    return drawn


def record_step(lab: Lab, name: str, prepare: Prepare, number: int) -> Recorded:
    make, messages = prepare(number), Messages()
    lab.exchange.barrier(f"recorded step {number} of {name}")
    lab.at(lab.config.steps, f"recorded step {number} of {name}")
    with messages.recorded(), listening(messages.on_phase), recorded(lab.device) as spans, slowed(lab.config.slowed_to):
        make()
    lab.work.advance()
    return lab.config.steps + number, spans, messages.found


def median_step(of_ranks: list[list[list[float]]]) -> tuple[int, float]:
    """Return index and start of the step of median length, from each rank's starts and ends."""
    steps = list(zip(*of_ranks, strict=True))
    lengths = [max(end for _, end in step) - min(start for start, _ in step) for step in steps]
    index = lengths.index(median_low(lengths))
    return index, min(start for start, _ in steps[index])


def written(message: Message, shift_s: float) -> list[object]:
    start_s, end_s = round(message.start_s + shift_s, 6), round(message.end_s + shift_s, 6)
    return [message.op, list(message.ranks), round(message.sent_bytes), message.nbytes, message.tag, start_s, end_s]


def count_messages(messages: list[Message]) -> int:
    """Return the messages on the wire: the larger of sends and receives, gloo's for collectives."""
    counts = [sum(message.op == op for message in messages) for op in ("send", "recv")]
    return max(counts) + sum(gloo_messages(message) for message in messages if message.op not in ("send", "recv"))


def gloo_messages(message: Message) -> int:
    if message.op in ("all_reduce", "reduce_scatter"):
        return gloo_all_reduce_messages(len(message.ranks), message.nbytes)
    return (len(message.ranks) - 1) * (1 if message.op == "all_to_all" else 2)


def compare_drawn(lab: Lab, drawn: Mapping[str, Drawn], counted: Mapping[str, Counted]) -> None:
    """Check that the timeline is complete: its bytes equal those of the ledger's calls and of the sockets.

    Within 1 %, plus gloo's frames on the wire. It is informational for PyTorch's variants, since the ledger misses
    calls in gloo's thread (ddp_powersgd's second factor), and for strategies whose steps never repeat, as a user's may;
    on the wire also for operations that gloo sends differently, such as reduce_scatter, which it sends twice.
    """
    for name, sent in drawn.items():
        traffic, shown = counted[name].traffic, PYTORCHS if name in lab.mode.by_torch else ""
        if is_own(name):
            shown = "your own: its steps may differ"
        if not sent.repeats:
            shown = shown or "its steps send different bytes"
        compare_bytes(lab, name, traffic.called_bytes, sent.nbytes, "bytes as called", shown)
        if traffic.wire_error is None:
            tolerance = wire_tolerance(sent.nbytes, sent.messages)
            other = ", ".join(sorted(sent.ops - MINIMAL))
            shown = shown or (f"gloo sends {other} in its own way" if other else "")
            wanted, on_wire = lab.bytes_to_compare(f"the wire as drawn of {name}", sent.nbytes, traffic.wire_bytes)
            lab.compare(
                ON_WIRE, wanted, on_wire, "B", tolerance, name, "bytes as drawn", shown=shown,
                control=CONTROL,
            )  # fmt: skip


def compare_bytes(lab: Lab, variant: str, wanted: float, drawn: float, formula: str, shown: str = "") -> None:
    """Check that a variant's drawn bytes are `wanted`, within 1 %."""
    lab.compare(DRAWN, wanted, drawn, "B", 0.01 * wanted, variant, formula, shown=shown, control=CONTROL)


def note_messages(lab: Lab, predicted_bytes: Mapping[str, float]) -> None:
    """Log on each rank the drawn collectives' messages: receivers, duration, and predicted bytes."""
    found = lab.journal.records
    spans = {each.variant: each.spans for each in found if isinstance(each, records.Timeline)}
    for each in [each for each in found if isinstance(each, records.Messages)]:
        sends = [call for call in each.calls if call[0] == "send"]
        receivers = f" to {name_ranks({call[1][1] for call in sends})}" if sends else ""
        took_ms = milliseconds(max((span[3] for span in spans[each.variant]), default=0.0))
        sent = human_bytes(sum(call[2] for call in each.calls))
        calls = counted(len(sends) or len(each.calls), "messages")
        text = f"{took_ms} ms: {calls}{receivers}, {sent}; predicted {human_bytes(predicted_bytes[each.variant])}"
        lab.note(each.variant, text)
