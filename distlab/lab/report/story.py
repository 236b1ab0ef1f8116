"""The story of one step on one rank: computation, messages, waits and results, in order of time.

It is built from two records, FirstStep (spans and calls) and Told (sample numbers), by one rule for all modes: a call
is printed when it begins, with three input numbers, and when it ends, with three output numbers from the same positions
on every rank. For one call the first numbers of all ranks are on one line, for the reader to add. Calls of the same
kind are printed once, and counted.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distlab.lab.report.records import CallSample, FirstStep, Start, Told, WeightSample
from distlab.lab.report.table import INDENT, filled, unbroken, with_units
from distlab.lab.report.timeline import Span
from distlab.lab.report.units import counted, human_bytes, milliseconds, name_ranks

NUMBERS = 31  # columns for three numbers and the gap before them
SMALL = 1e-3  # below it six decimals are too few
FEW = 6  # calls of a kind with parameters: all are printed
ROUNDS = 3  # of exchanges in one layer
SUMS = ("all_reduce", "reduce", "reduce_scatter")
MESSAGES = ("send", "recv")
ROUNDED, WRONG = 1e-4, 0.02  # relative to the largest number: rounding error of a 16-bit sum, and a real error
WAITED_S = 1e-3  # shorter waits are not mentioned
PASSES = ("forward", "backward", "input")
CLOSE_S = 1e-3  # between a message and the pass it belongs to
TINY = 0.01  # relative to the largest call: smaller ones get one line
RESULTS = {"all_reduce": "the sum", "reduce": "the sum", "reduce_scatter": "my part of the sum"}


Kind = tuple[object, ...]  # the properties that define acts of one kind


class Line(NamedTuple):
    """One line of the log; lines of several ranks with the same key are about the same event."""

    text: str
    key: str = ""


class Act(NamedTuple):
    """A call, or several simultaneous messages, on this rank."""

    samples: list[CallSample]
    start_s: float
    end_s: float
    nbytes: float
    waited: "Counter[int]"  # seconds by the rank waited for

    @property
    def first(self) -> CallSample:
        return self.samples[0]

    @property
    def is_exchange(self) -> bool:
        return self.first.op in MESSAGES

    @property
    def is_header(self) -> bool:
        """Return whether it is a message of integers, such as a shape."""
        values = self.first.given or self.first.taken
        return self.is_exchange and len(self.first.shape) == 1 and digits_for(values) < 0

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the properties that define acts of one kind."""
        first = self.first
        module = first.inside.partition(".")[2] or bool(first.inside)
        if self.is_exchange and not first.inside:
            return (first.op, *first.ranks, len(first.shape))
        label = re.sub(r"\d+", "", first.label)
        if label or first.parameters:  # when a unit is gathered or a bucket is full does not matter
            module = ""
        op = "exchange" if self.is_exchange else first.op
        return (op, first.backward, module, label, bool(first.parameters), first.at_once)


class Chunk(NamedTuple):
    """Some lines for one moment of the step."""

    at_s: float
    lines: list[Line]


def digits_for(values: Sequence[float]) -> int:
    """Return the decimals: six, none for integers (-1), exponents (0) for small ones."""
    if values and all(value == int(value) for value in values) and any(values):
        return -1
    return 6 if max(map(abs, values), default=0) >= SMALL else 0


def number(value: float, digits: int) -> str:
    return f"{value:+.0f}" if digits < 0 else f"{value:+.{digits}f}" if digits else f"{value:+.2e}"


def numbers(values: Sequence[float]) -> str:
    digits = digits_for(values)
    return " ".join(f"{number(value, digits):>9}" for value in values)


class Story:
    """Makes the lines of a step, `width` columns wide."""

    def __init__(self, start: Start, first: FirstStep, logged: Told, width: int) -> None:
        self.me, self.width = start.rank, width
        self.config = start.config
        self.first, self.logged = first, logged
        compressed = any(sample.left for sample in logged.calls)  # then messages are not readable numbers
        self.acts = merged([self.act(sample) for sample in logged.calls if sample.parameters or not compressed])
        self.main = self.main_act()

    def act(self, sample: CallSample) -> Act:
        calls = [self.first.calls[index] for index in sample.calls if index < len(self.first.calls)]
        waited: Counter[int] = Counter()
        for call in calls:
            if call[9] >= 0:
                waited[call[9]] += call[8]
        ends = [call[6] for call in calls] if not sample.wait_s else [sample.wait_s[1]]
        nbytes = 4.0 * math.prod(sample.shape) if not calls else 0.0
        nbytes += sum(call[3] for call in calls if sample.op in MESSAGES or call[0] == sample.op or call[0] == "send")
        return Act([sample], sample.start_s, max(ends, default=sample.start_s), nbytes, waited)

    def main_act(self) -> Act | None:
        """Return the act whose numbers of all ranks are printed: a sum with the sampled parameter, or the largest."""
        name = self.logged.weight.name if self.logged.weight else ""
        candidates = [act for act in self.acts if len(act.first.of_ranks) > 1 and act.first.op in (*SUMS, "all_gather")]
        ranked = sorted(
            candidates,
            key=lambda act: (
                act.first.op not in SUMS,
                act.first.tensor != name,
                all(value == 0 for _, value in act.first.of_ranks[1:]),
                -act.nbytes,
                act.first.inside in ("", "0"),
            ),
        )
        others = [act for act in ranked if not act.first.inside.startswith("0")] or ranked
        return others[0] if others else None

    # --- lines ---

    def at(self, seconds: float | None, text: str, values: Sequence[float] = (), key: str = "") -> list[Line]:
        """Return a line for a moment, with numbers at its right end, on two lines if they do not fit."""
        time = "" if seconds is None else f"{1000 * seconds:7.1f}"
        head = f"{time:<{INDENT}}"
        right = f"{numbers(values):>{NUMBERS}}" if values else ""
        if len(head) + len(text) + len(right) <= self.width:
            return [Line(f"{head}{text}{right:>{self.width - len(head) - len(text)}}".rstrip(), key)]
        lines = filled(head + with_units(text), self.width, INDENT + 2)
        if right and len(lines[-1]) + len(right) <= self.width:
            lines[-1] += f"{right:>{self.width - len(lines[-1])}}"
        elif right:
            lines.append(f"{right:>{self.width}}")
        return [Line(each, key) for each in lines]

    def where(self, sample: CallSample) -> str:
        """Return the layer, its part and the pass: "block 1, attention, backward"."""
        index, _, part = sample.inside.partition(".")
        name = self.layer(int(index)) if index else "loss" if sample.op in SUMS else ""
        parts = [name, part if name.startswith("block") else "", "backward" if sample.backward else ""]
        return ", ".join(filter(None, parts))

    def layer(self, index: int) -> str:
        depth = self.config.get("LAB_DEPTH")
        if self.config.get("LAB_MODEL") != "gpt" or not isinstance(depth, int):
            return f"layer {index}"
        return "embedding" if index == 0 else "head" if index > depth else f"block {index}"

    def layers(self, names: Sequence[str]) -> str:
        """Return the layers of some parameters: "block 1 to head"."""
        found = list(dict.fromkeys(int(each) for each in re.findall(r"layers\.(\d+)\.", " ".join(names))))
        return " to ".join(dict.fromkeys(self.layer(index) for index in (found[0], found[-1]))) if found else ""

    def carried(self, sample: CallSample) -> str:
        """Return the contents of a call, in words."""
        layers = self.layers(sample.parameters)
        if sample.label.startswith("unit"):
            return f"{sample.label} ({layers})" if layers else sample.label
        if not layers:
            return f"[{', '.join(map(str, sample.shape))}]"
        return f"{layers} ({counted(len(sample.parameters), 'tensors')})"

    def rank_numbers(self, sample: CallSample, total: Sequence[float], key: str) -> list[Line]:
        """Return the line whose numbers the reader can add."""
        values = [value for _, value in sample.of_ranks]
        digits = digits_for(values)
        names = ["me" if rank == self.me else f"rank {rank}" for rank, _ in sample.of_ranks]
        who = [f"{name} {number(value, digits)}" for name, value in zip(names, values, strict=True)]
        text = ", ".join(map(unbroken, who))
        if total:
            text += unbroken(f": {number(total[0], digits)}")
            off = abs(sum(values) - total[0])
            largest = max(map(abs, values))
            if len(values) > 1 and abs(sum(values) / len(values) - total[0]) <= ROUNDED * largest:
                text += ", their mean"
            elif off > ROUNDED * largest and max(values) != total[0]:
                text += f", but their sum is {number(sum(values), digits)}" if off > WRONG * largest else ", rounded"
        lines = filled(f"{'':<{INDENT}}  {text}", self.width, INDENT + 2)
        return [Line(line, key) for line in lines]

    def waited(self, act: Act) -> str:
        if not act.waited:
            return ""
        (rank, seconds), *_ = act.waited.most_common(1)
        return f"; I waited {milliseconds(seconds)} ms for rank {rank}" if seconds >= WAITED_S else ""

    # --- one act ---

    def full(self, act: Act) -> Iterator[Chunk]:
        """Yield an act with its numbers, its start and end each at its time."""
        sample = act.first
        if act.is_exchange:
            yield from self.exchange(act)
            return
        key = f"{sample.op} {sample.ranks} {sample.inside} {sample.backward} {self.carried(sample)}"
        size = human_bytes(act.nbytes)
        if sample.op == "all_gather":
            text = f"gather {self.carried(sample)}, {size}: my part begins"
            yield Chunk(act.start_s, self.at(act.start_s, text, sample.given, key))
            whole = self.at(act.end_s, f"  it is whole{self.waited(act)}", (), key)
            yield Chunk(act.end_s, whole + self.rank_numbers(sample, (), key))
            return
        if sample.parameters:
            begun = f"{sample.op} of {self.carried(sample)}, {size}, begins{'' if sample.at_once else ': I go on'}"
            gradient = [
                one + other for one, other in zip(sample.given, sample.left or [0.0] * len(sample.given), strict=True)
            ]
            mine = self.at(None, f"  my gradient of {sample.tensor}", gradient, key)
            if sample.left:
                mine += self.at(None, "  of it I send the largest numbers", sample.given, key)
                mine += self.at(None, "  and keep for the next step", sample.left, key)
            yield Chunk(act.start_s, self.at(act.start_s, begun, (), key) + mine)
        else:
            text = f"{self.where(sample)}: my {self.carried(sample)} begins"
            yield Chunk(act.start_s, self.at(act.start_s, text, sample.given, key))
        result = f"  {RESULTS.get(sample.op, sample.op)} of {len(sample.ranks)} ranks{self.waited(act)}"
        lines = self.at(act.end_s, result, sample.taken, key)
        yield Chunk(act.end_s, lines + (self.rank_numbers(sample, sample.taken, key) if act is self.main else []))

    def exchange(self, act: Act) -> Iterator[Chunk]:
        """Yield messages with peers and contents; one in each direction share a line."""
        where = f"{self.where(act.first)}: " if act.first.inside else ""
        if [each.op for each in act.samples] in (["recv", "send"], ["send", "recv"]):
            sent, got = sorted(act.samples, key=lambda each: each.op, reverse=True)
            ends = [number(of[0], digits_for(of)) if of else "" for of in (sent.given, got.taken)]
            text = f"{where}to rank {sent.ranks[1]} {ends[0]}, from rank {got.ranks[0]} {ends[1]}{self.waited(act)}"
            yield Chunk(act.end_s, self.at(act.end_s, text, (), f"{sent.ranks} {act.first.inside} {sent.backward}"))
            return
        for op, direction, at_s in (("send", "to", act.start_s), ("recv", "from", act.end_s)):
            samples = sorted((each for each in act.samples if each.op == op), key=lambda each: each.ranks)
            peers = [each.ranks[op == "send"] for each in samples]
            values = [each.given if op == "send" else each.taken for each in samples]
            waited = self.waited(act) if op == "recv" else ""
            if len(peers) == 1:
                waited = waited.replace(f" for rank {peers[0]}", "").replace("; I waited", " after")
            key = f"{[each.ranks for each in samples]} {act.first.backward}"
            if len(samples) == 1:
                text = f"{where}{direction} rank {peers[0]}{waited}{self.microbatch(act)}: {self.carried(samples[0])}"
                yield Chunk(at_s, self.at(at_s, text, values[0], key))
            elif samples:
                rows = [
                    unbroken(f"rank {peer}: {each.shape[0]} {number(of[0], 6) if of else ''}".rstrip())
                    for peer, each, of in zip(peers, samples, values, strict=True)
                ]
                text = f"{where if op == 'send' else '  '}rows {direction} {', '.join(rows)}{waited}"
                yield Chunk(at_s, self.at(at_s, text, (), key))

    def microbatch(self, act: Act) -> str:
        """Return the pass that a message is for or from, if a step has several microbatches."""
        spans = [Span(*span) for span in self.first.spans if span[0] in PASSES]
        if len({span.label for span in spans}) < 2:
            return ""
        if act.first.op == "recv":
            after = next((span for span in spans if span.start_s >= act.end_s - CLOSE_S), None)
            return f", for {after.kind} {after.label}" if after else ""
        before = (span for span in spans if span.end_s <= act.start_s + CLOSE_S)
        nearest = min(before, key=lambda span: abs(span.end_s - act.start_s), default=None)
        return f", of {nearest.kind} {nearest.label}" if nearest else ""

    def short(self, acts: Sequence[Act]) -> Chunk:
        """Return acts of one kind in one line."""
        act, sample = acts[0], acts[0].first
        size = human_bytes(sum(each.nbytes for each in acts))
        if act.is_exchange:
            peers = {rank for each in act.samples for rank in each.ranks if rank not in (self.me, -1)}
            what = f"{counted(len(acts), 'exchanges')} with {name_ranks(peers)}, {size}"
        else:
            times = f"{len(acts)} x " if len(acts) > 1 else ""
            ends = [number(of[0], digits_for(of)) for of in (sample.given, sample.taken) if of]
            becomes = f": {' -> '.join(ends)}" if len(ends) > 1 else ""
            of = self.places(acts).removeprefix(", ") if sample.label.startswith("unit") else self.carried(sample)
            what = f"{times}{sample.op} of {of}, {size}{becomes}"
        where = self.where(sample)
        return Chunk(act.start_s, self.at(act.start_s, f"{where}: {what}" if where else what))

    # --- the step ---

    def lines(self, room: int) -> list[Line]:
        """Return the step in about `room` lines at most: if it has more, groups of calls lose their numbers, then their
        line, first those of the backward pass and small ones."""
        groups: dict[Kind, list[Act]] = {}
        for act in self.acts:
            groups.setdefault(act.kind, []).append(act)
        largest = max((act.nbytes for act in self.acts), default=0)
        tiny = {kind for kind, acts in groups.items() if max(act.nbytes for act in acts) <= TINY * largest}
        omitted = {kind for kind, acts in groups.items() if (kind in tiny and acts[0].is_exchange) or acts[0].is_header}
        one_line, first_only = tiny - omitted, set[Kind]()
        sizes = {kind: sum(act.nbytes for act in acts) for kind, acts in groups.items() if self.main not in acts}
        order = sorted(sizes, key=lambda kind: (not groups[kind][0].first.backward, sizes[kind]))
        backward = [kind for kind in order if groups[kind][0].first.backward]
        main = [kind for kind, acts in groups.items() if self.main in acts]
        turns = [(first_only, kind) for kind in [*main, *order]] + [(one_line, kind) for kind in backward]
        turns += [(omitted, kind) for kind in tiny] + [(level, kind) for level in (one_line, omitted) for kind in order]
        for reduced, kind in [*turns, (omitted, ())]:
            chunks = [*self.passes(), *self.chunks_of_groups(groups, first_only, one_line, omitted)]
            chunks.sort(key=lambda chunk: chunk.at_s)
            lines = [line for chunk in chunks for line in chunk.lines]
            if len(lines) <= room:
                break
            reduced.add(kind)
        return lines

    def chunks_of_groups(
        self, groups: dict[Kind, list[Act]], first_only: set[Kind], one_line: set[Kind], omitted: set[Kind]
    ) -> Iterator[Chunk]:  # fmt: skip
        for kind, acts in groups.items():
            first = acts[0].first
            if kind in one_line - omitted:
                yield self.short(acts)
            elif (
                kind not in omitted | first_only
                and len(acts) <= FEW
                and first.parameters
                and not (first.at_once or first.label or acts[0].is_exchange)
            ):
                for act in acts:
                    yield from self.full(act) if act is self.main else [self.launch(act)]
            elif kind not in omitted:
                yield from self.first_of(acts, 1 if kind in first_only else ROUNDS)
        yield from self.messages(groups, one_line | omitted)
        left = [act for kind in omitted for act in groups.get(kind, [])]
        if left:
            text = f"and {len(left)} more call{'s' * (len(left) > 1)}, {human_bytes(sum(act.nbytes for act in left))}"
            yield Chunk(float("inf"), self.at(None, text))

    def first_of(self, acts: Sequence[Act], rounds: int) -> Iterator[Chunk]:
        """Yield the first act of a kind, or one layer's exchanges, or the main one; then the number of others."""
        shown = [act for act in acts if act is self.main] or [acts[0]]
        if acts[0].kind[0] in MESSAGES:
            shown = [max(acts, key=lambda act: act.nbytes)]
        if acts[0].is_exchange and acts[0].first.inside:
            shown = [act for act in acts if act.first.inside == acts[0].first.inside][:rounds]
        for act in shown:
            yield from self.full(act)
        others = [act for act in acts if act not in shown]
        if not others or (acts[0].is_exchange and not acts[0].first.inside):  # `messages` prints these together
            return
        first = acts[0].first
        noun = first.op if not acts[0].is_exchange else "exchange" if len(others) == 1 else "exchanges"
        size, until_ms = human_bytes(sum(act.nbytes for act in others)), 1000 * max(act.end_s for act in others)
        text = f"{len(others)} more {noun} like it, {size}{self.places(others)}, until {until_ms:.0f} ms"
        yield Chunk(max(act.end_s for act in shown) + 1e-9, self.at(None, text, (), f"more {acts[0].kind}"))

    def messages(self, groups: dict[Kind, list[Act]], excluded: set[Kind]) -> Iterator[Chunk]:
        """Yield the messages outside of layers like those already printed: how many, and the peers."""
        found = {
            kind: sorted(acts, key=lambda act: -act.nbytes)[1:]
            for kind, acts in groups.items()
            if kind[0] in MESSAGES and kind not in excluded and acts[1:]
        }
        if not found:
            return
        ends = [(acts[0].first, len(acts)) for acts in found.values()]
        peers = ", ".join(
            unbroken(f"{number} {'to' if first.op == 'send' else 'from'} rank {first.ranks[first.op == 'send']}")
            for first, number in ends
        )
        acts = [act for of_kind in found.values() for act in of_kind]
        size, until_s = human_bytes(sum(act.nbytes for act in acts)), max(act.end_s for act in acts)
        what = f"{len(acts)} more message{'s' * (len(acts) > 1)} like these: {peers}; {size}"
        yield Chunk(until_s, self.at(None, f"{what}, until {1000 * until_s:.0f} ms", (), "messages"))

    def launch(self, act: Act) -> Chunk:
        text = f"{act.first.op} of {self.carried(act.first)}, {human_bytes(act.nbytes)}, begins: I go on"
        return Chunk(act.start_s, self.at(act.start_s, text, (), f"launch {self.carried(act.first)}"))

    def places(self, acts: Sequence[Act]) -> str:
        """Return the layers of some acts, or their labels."""
        labels = [act.first.label for act in acts if act.first.label.startswith("unit")]
        found = [self.layer(int(act.first.inside.partition(".")[0])) for act in acts if act.first.inside]
        ends = labels or found
        return f", {' to '.join(dict.fromkeys((ends[0], ends[-1])))}" if ends else ""

    def passes(self) -> Iterator[Chunk]:
        """Yield the starts of forward and backward, the loss, and the update."""
        spans = [Span(*span) for span in self.first.spans]
        forward = [span for span in spans if span.kind == "forward"]
        backward = [span for span in spans if span.kind in ("backward", "input")]
        known = [value for value in self.logged.shares if value is not None]
        if known and forward:
            last_s = max(span.end_s for span in forward)
            alone = backward and len({span.label for span in forward}) == 1
            text = self.loss(known) + ("; now backward" if alone else "")
            yield Chunk(last_s, self.at(last_s, text, (), "loss"))
        for span in spans:
            if span.kind == "optimizer" and self.logged.weight is not None:
                yield Chunk(span.start_s + 1.0, self.update(span, self.logged.weight))

    def loss(self, known: Sequence[float]) -> str:
        share, total = self.logged.shares[self.me], f"{sum(known):.6f}"
        others = [rank for rank, value in enumerate(self.logged.shares) if value is not None and rank != self.me]
        if share is None:
            return f"the loss of the whole batch is {total}"
        if not others:
            return f"the loss is {total}"
        return f"my part of the loss is {share:.6f}; with {name_ranks(others)} it is {total}"

    def update(self, span: Span, weight: WeightSample) -> list[Line]:
        plain = weight.rate and self.config.get("LAB_OPTIMIZER") == "sgd"
        text = f"weight - {weight.rate:g} x gradient gives" if plain else "after the optimizer's step my weight is"
        return self.at(span.end_s, text, weight.after, "update")


def merged(acts: Sequence[Act]) -> list[Act]:
    """Merge messages that a layer exchanges with several ranks at once into one act."""
    found: list[Act] = []
    for act in acts:
        before = found[-1] if found else None
        if before is not None and is_one_exchange(before, act):
            found[-1] = Act(
                [*before.samples, *act.samples], min(before.start_s, act.start_s), max(before.end_s, act.end_s),
                before.nbytes + act.nbytes * (act.first.op == "send"), before.waited + act.waited,
            )  # fmt: skip
        else:
            found.append(act)
    return found


def is_one_exchange(before: Act, act: Act) -> bool:
    """Return whether two consecutive acts are one exchange: no repeated peer, no wait in between."""
    if not (before.is_exchange and act.is_exchange and act.first.inside):
        return False
    same = (before.first.inside, before.first.backward) == (act.first.inside, act.first.backward)
    twice = (act.first.op, act.first.ranks) in [(each.op, each.ranks) for each in before.samples]
    return same and not twice
