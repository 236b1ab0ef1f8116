"""A rank's own log: the story of that rank, from its part of the model to its result.

Lines are made from records, as soon as a line's last record is written, so `distlab report RUN --log 2` prints the
same lines again. The first step of one variant is printed in full (story.py), other variants in a phrase; LAB_LOG=full
prints the steps of all. A log has at most MOST_LINES lines, none longer than its width.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from distlab.lab.report import records, table
from distlab.lab.report.records import Record
from distlab.lab.report.story import Line, Story
from distlab.lab.report.table import INDENT, unbroken
from distlab.lab.report.tables import row as chart_row
from distlab.lab.report.timeline import Span, step_seconds
from distlab.lab.report.units import counted, difference, human_bytes, milliseconds
from distlab.lab.report.verdict import passes

WIDTH = 96  # columns of its file
MOST_LINES = 25  # in a normal log, with its verdict; with a chart of the schedule MOST_WITH_CHART
MOST_WITH_CHART = 30
AT_THE_END = 7  # lines: two each for bytes sent and other variants; losses, one of the mode, the verdict
CHART_COLUMNS = 56
FEW_SAMPLES = 4
FEW_LOSSES = 8
HEADERS_SHARE = 0.01  # relative to the peer that gets most: less than that is only acknowledgements and headers
Log = Literal["quiet", "normal", "full"]


class RankLog:
    """The lines of one rank, from its records."""

    def __init__(self, log: Log = "normal", width: int = WIDTH) -> None:
        self.log, self.width = log, width
        self.before: list[Record] = []
        self.num_lines = 0
        self._waiting: list[records.Noted] = []  # its mode's notes on the step, until the step is printed

    @classmethod
    def of(cls, written: Sequence[Record], log: Log = "normal", width: int = WIDTH) -> "RankLog":
        """Return the log of a rank with these records."""
        made = cls(log, width)
        for record in written:
            made.lines(record)
        return made

    def lines(self, record: Record) -> list[Line]:
        """Return the lines that this record adds, given those before it."""
        lines = list(self._lines_of(record)) if self.log != "quiet" else []
        self.before.append(record)
        self.num_lines += len(lines)
        return lines

    def _lines_of(self, record: Record) -> Iterator[Line]:
        if isinstance(record, records.Placed):
            yield from self.place(record)
        elif isinstance(record, records.Noted):
            if self.trains and self.last(records.Told) is None:
                self._waiting.append(record)
            else:
                yield from self.wrapped(record.heading, record.text)
        elif isinstance(record, records.Holds):
            logged = next((each for each in self.all(records.Told) if each.variant == record.variant), None)
            if logged is not None:
                yield from self.step(record, logged)
        elif isinstance(record, records.End):
            yield from self.end()

    def all(self, kind: type[records.Kind]) -> Iterator[records.Kind]:
        """Yield the records of a kind so far."""
        return (record for record in self.before if isinstance(record, kind))

    def last(self, kind: type[records.Kind]) -> records.Kind | None:
        return next((record for record in reversed(self.before) if isinstance(record, kind)), None)

    @property
    def start(self) -> records.Start:
        return next(self.all(records.Start))

    @property
    def trains(self) -> bool:
        """Return whether a step will be logged."""
        expected = next(self.all(records.Expected), records.Expected([]))
        return any(name == "timed steps" for _, name, *_ in expected.claims)

    def wrapped(self, word: str, text: str, key: str = "") -> list[Line]:
        return [Line(line, key or word) for line in table.wrapped(word, table.with_units(text), self.width)]

    # --- its place, its parameters and samples ---

    def place(self, record: records.Placed) -> Iterator[Line]:
        """Yield this rank's place, its mode's idea, and the injected bug."""
        start = self.start
        idea = (start.idea or start.title).partition(": ")
        head = f"rank {start.rank} of {start.world_size} · {start.run_mode} · {idea[2] or idea[0]}".rstrip(".")
        yield from (Line(text, "rank") for text in table.filled(head, self.width, 2))
        axes = [f"{axis} {index} of {size}" for axis, (index, size) in record.axes.items() if size > 1]
        if len(axes) > 1:
            yield from self.wrapped("I am", ", ".join(axes), "place")
        if self.log == "full":
            yield from self.wrapped("machine", f"{start.host} ({record.ip}) · {record.device} · {start.title}")
        if start.mistake and start.rank:  # rank 0's log began with it
            yield from self.wrapped("bug", f"LAB_BUG={start.mistake['name']}: {start.mistake['what']}")

    def step(self, holds: records.Holds, logged: records.Told) -> Iterator[Line]:
        """Yield its parameters and samples, then the step."""
        first = next(each for each in self.all(records.FirstStep) if each.variant == logged.variant)
        story = Story(self.start, first, logged, self.width)
        lines = [*self.parameters(holds, story, logged), *self.inputs()]
        lines += [
            line for note in self._waiting if note.heading != "holds" for line in self.wrapped(note.heading, note.text)
        ]
        self._waiting.clear()
        title = f"STEP {logged.step} of `{logged.variant}`: {self.start.stories.get(logged.variant, '')}".rstrip(": ")
        lines += [Line(text, "step") for text in table.filled(title, self.width, INDENT)]
        lines += self.chart(first)
        most = MOST_WITH_CHART if len({span[1] for span in first.spans if span[0] == "forward"}) > 1 else MOST_LINES
        room = most * WIDTH // self.width - AT_THE_END - self.num_lines - len(lines)  # narrow lines take more rows
        yield from lines
        yield from story.lines(1000 if self.log == "full" else max(8, room))

    def parameters(self, holds: records.Holds, story: Story, logged: records.Told) -> list[Line]:
        """Return its share of the model, in its mode's words, and the numbers of one parameter."""
        mine = sum(each[4] for each in holds.parameters)
        cut = sum(bool(each[3]) for each in holds.parameters)
        own = [note.text for note in self._waiting if note.heading == "holds"]
        layers = story.layers([each[0] for each in holds.parameters])
        whole = counted(len(holds.parameters), "tensors") + (f" of {layers}" if layers != "embedding to head" else "")
        parts = f", {cut} of them cut" if cut else ", each whole"
        lines = self.wrapped("I hold", f"{human_bytes(mine)}: {whole}{parts}{'; ' if own else ''}{'; '.join(own)}")
        if logged.weight is not None:
            shape = f"[{', '.join(map(str, logged.weight.shape))}]"
            lines += story.at(None, f"my {logged.weight.name} {shape} begins", logged.weight.before, "I hold")
        return lines

    def inputs(self) -> list[Line]:
        """Return the samples that it works on."""
        inputs, placed = self.last(records.Given), self.last(records.Placed)
        if inputs is None:
            return []
        stage, stages = (placed.axes if placed is not None else {}).get("pp", [0, 1])
        if 0 < stage < stages - 1:
            return self.wrapped("I get", "no samples: what the ranks before and after me send")
        few = inputs.samples[:FEW_SAMPLES]
        more = f" and {len(inputs.samples) - len(few)} more" if len(inputs.samples) > len(few) else ""
        sizes = f", in {len(inputs.microbatches)} microbatches" if len(inputs.microbatches) > 1 else ""
        ids = " ".join(map(str, few))
        what = "" if stages == 1 else "the inputs of " if stage == 0 else "the targets of "
        text = f"{what}{len(inputs.samples)} of {counted(inputs.batch, 'samples')}{sizes}: {ids}{more}"
        return self.wrapped("I get", text)

    def chart(self, first: records.FirstStep) -> list[Line]:
        """Return this rank's microbatches on a time axis, if there are several."""
        spans = sorted((Span(*span) for span in first.spans), key=lambda span: (span.start_s, -span.end_s))
        if len({span.label for span in spans if span.kind == "forward"}) < 2:
            return []
        columns = min(CHART_COLUMNS, self.width - 2 * INDENT - 8)
        drawn = chart_row(spans, step_seconds([spans]), columns)
        return self.wrapped("measured", f"{'me':<12} {drawn} {1000 * step_seconds([spans]):.0f} ms")

    # --- its results ---

    @property
    def headline(self) -> str:
        logged = next(self.all(records.Told), None)
        wires = [each.variant for each in self.all(records.Wire)]
        return logged.variant if logged is not None else next(iter(wires), "")

    def end(self) -> Iterator[Line]:
        """Yield bytes, memory, losses, the other variants, and this rank's checks."""
        for note in self._waiting:  # no step was logged: a resumed run may have none left
            yield from self.wrapped(note.heading, note.text)
        yield from self.sent()
        yield from self.losses_and_costs()
        yield from self.others()
        yield from self.failures()

    def sent(self) -> list[Line]:
        """Return the bytes sent by its sockets in a step of the logged variant, by peer, with the formula."""
        wires = [each for each in self.all(records.Wire) if each.variant == self.headline]
        most = max((wire.sent_bytes for wire in wires), default=0)
        peers = {wire.peer: wire.sent_bytes for wire in wires if wire.sent_bytes > HEADERS_SHARE * most}
        if not peers:
            return []
        amounts = ", ".join(unbroken(f"{human_bytes(nbytes)} to rank {rank}") for rank, nbytes in peers.items())
        total = f"{human_bytes(sum(wire.sent_bytes for wire in wires))} per step: " if len(peers) > 1 else ""
        text = f"{total}{amounts}{' per step' if not total else ''}"
        claims = (c for c in self.all(records.Comparison) if c.name == "wire bytes" and c.variant == self.headline)
        claim = next(claims, None)
        if claim is not None:
            text += f"; predicted {human_bytes(claim.predicted)}{f' = {claim.formula}' if claim.formula else ''}"
        return self.wrapped("I sent", text)

    def losses_and_costs(self) -> list[Line]:
        """Return the logged variant's first and last losses, and a step's time and memory."""
        found = [each for each in self.all(records.Losses) if each.variant == self.headline]
        values = [f"{value:.3f}" for value in (found[-1].numbers if found else [])]
        if len(values) > FEW_LOSSES:
            values = [*values[: FEW_LOSSES - 1], "to", values[-1]]
        parts = [" ".join(values)] if values else []
        steps = (each.step_seconds for each in self.all(records.Steps) if each.variant == self.headline)
        parts += [f"{milliseconds(median(seconds))} ms per step" for seconds in steps if seconds]
        for classes in self.all(records.Classes):
            if classes.variant == self.headline:
                rest, peak = (human_bytes(sum(each.values())) for each in (classes.rest_bytes, classes.peak_bytes))
                parts.append(f"memory {rest}, peak {peak}")
        return self.wrapped("losses" if values else "step", " · ".join(parts)) if parts else []

    def others(self) -> list[Line]:
        """Return every other variant in a phrase: its step time, and its bytes."""
        sent: dict[str, float] = defaultdict(float)
        for wire in self.all(records.Wire):
            sent[wire.variant] += wire.sent_bytes
        phrases = [
            f"{each.variant} {milliseconds(median(each.step_seconds))} ms {human_bytes(sent[each.variant])}"
            for each in self.all(records.Steps)
            if each.step_seconds and each.variant != self.headline
        ]
        return self.wrapped("also", " · ".join(map(unbroken, phrases))) if phrases else []

    def failures(self) -> list[Line]:
        """Return the failed checks of this rank, each with its number."""
        failed = [each for each in self.deciding_checks() if not passes(each)]
        lines = []
        for each in failed[:3]:
            off = (
                f"differs by {difference(each.max_abs_diff)}"
                if isinstance(each, records.Check)
                else f"measured {each.measured:.4g}, predicted {each.predicted:.4g}"
            )
            detail = f" ({each.detail})" if isinstance(each, records.Check) and each.detail else ""
            lines += self.wrapped("FAILED", f"{each.variant} {each.name}: {off}{detail}".strip())
        if len(failed) > 3:
            lines += self.wrapped("FAILED", f"and {len(failed) - 3} more of my checks")
        return lines

    def deciding_checks(self) -> list[records.Check | records.Comparison]:
        """Return the checks of this rank that decide."""
        return [*self.all(records.Check), *(each for each in self.all(records.Comparison) if each.decides)]

    def verdict(self, verdict: str, folder: Path) -> list[Line]:
        """Return the last line: this rank's checks, and the run's verdict."""
        checks = self.deciding_checks()
        passed = sum(passes(each) for each in checks)
        own = f"{passed} of {counted(len(checks), 'checks')} of mine passed" if checks else "I made no check"
        return [Line(f"{verdict.upper():<{INDENT}}{own} · report {folder / 'report.html'}", "verdict")]
