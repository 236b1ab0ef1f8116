"""The staircase of a pipeline as text: a row a rank, a column a 64th of the step, for whoever reads only the log.

    timeline   1f1b: bubble 0.27 measured, 0.27 by (p-1)/(m+p-1)
               rank 0 |000111222333aaaaaa...|

A column shows what took most of it. Inside a span that holds others, the inner one counts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from workers.report.claims import Run
from workers.report.records import Ranks
from workers.report.spans import Span, bubble_sentence, step_seconds, timelines

COLUMNS = 64
FINE = 8  # samples a column
IDLE = "."
LEGEND = "0-9 forward of that microbatch, a-z its backward, A-Z its weights apart, - communication, + optimizer, . idle"


def staircases(run: Run, records: Ranks) -> Iterator[str]:
    """The chart of each variant whose bubble was compared, without the log's first column; a legend at the end."""
    drawn = False
    for variant, of_ranks in timelines(records, run["world_size"]).items():
        if sentence := bubble_sentence(run, variant):
            yield f"{variant}: {sentence}"
            yield from rows(of_ranks)
            drawn = True
    if drawn:
        yield LEGEND


def rows(of_ranks: Sequence[Sequence[Span]], columns: int = COLUMNS) -> list[str]:
    """A row a rank, from the first start to the last end of all."""
    step_s = step_seconds(of_ranks)
    return [f"rank {rank} |{row(spans, step_s, columns)}|" for rank, spans in enumerate(of_ranks)]


def row(spans: Sequence[Span], step_s: float, columns: int) -> str:
    """One rank's step of `step_s` seconds; outer spans come before those inside them, which paint over them."""
    fine = [IDLE] * (columns * FINE)
    for span in spans:
        first, last = (round(time_s / step_s * len(fine)) for time_s in (span.start_s, span.end_s))
        fine[first:last] = sign(span) * (last - first)
    cells = [fine[start : start + FINE] for start in range(0, len(fine), FINE)]
    return "".join(Counter(cell).most_common(1)[0][0] for cell in cells)


def sign(span: Span) -> str:
    """One letter for a span: a digit for a forward, a letter for a backward of the same microbatch, a large one for its
    weights where they come apart."""
    number = int(span.label) if span.label.isdecimal() else 0
    if span.kind == "forward":
        return str(number % 10)
    if span.kind in ("backward", "input", "weight"):
        return chr(ord("A" if span.kind == "weight" else "a") + number % 26)
    return {"optimizer": "+", "receive": IDLE, "wait": IDLE, "data": IDLE}.get(span.kind, "-")
