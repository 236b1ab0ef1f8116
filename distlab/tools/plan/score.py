"""The planner held to published runs: what it predicts of each row of published.json beside what was measured.

`distlab plan --score` prints it. The shares of a GPU's peaks in gpus.json are fitted by `python -m benchmarks.plan_fit` on the
rows that published.json names, at most five a kind of GPU, never on those that its rule keeps out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import msgspec

from distlab.lab.report.table import aligned
from distlab.lab.report.units import human_bytes, three_digits
from distlab.tools.plan import gpu as gpus
from distlab.tools.plan.costs import cost
from distlab.tools.plan.gpu import gpu_named, tables
from distlab.tools.plan.job import Job, Link, Weights
from distlab.tools.plan.layout import Layout
from distlab.tools.plan.model import Shape

PUBLISHED = Path(__file__).with_name("published.json")
LATENCY_S, NODE_LATENCY_S = 10e-6, 5e-6
MOST_FITTED, HELD_OUT = 5, 2  # rows of a kind, and the rest modulo 3 of the places that are in no fit
NEAR, MEMORY_NEAR = 0.25, 0.10
WEIGHTS = {
    "mixed": Weights(2, masters=True, moment_bytes=8),
    "bf16": Weights(2, masters=False, moment_bytes=4),
    "fp32": Weights(4, masters=False, moment_bytes=8),
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A published run: model, layout and what was measured of a step and of a GPU's memory."""

    name: str
    source: str
    gpu: str
    gpus: int
    gpus_per_node: int = 8
    parameters: float
    shape: Shape
    sequence: int
    tp: int
    pp: int
    cp: int
    dp: int
    ep: int = 1
    zero: int
    chunks: int
    microbatch: int
    global_batch: int
    recompute: str
    flash: bool = True
    sequence_parallel: bool = True
    fp8: bool = False
    overlap_tp: bool = False
    precision: str = "mixed"
    step_s: float | None = None
    peak_bytes: float | None = None
    rest_bytes: float | None = None
    activation_bytes: float | None = None
    note: str = ""


class Published(msgspec.Struct, frozen=True):
    held_out: str
    fit: dict[str, list[str]]
    rows: list[Row]


@cache
def published() -> Published:
    return msgspec.json.decode(PUBLISHED.read_bytes(), type=Published)


def asked(row: Row) -> tuple[Job, Layout]:
    """The row as a job on paper."""
    card = gpu_named(row.gpu)
    job = Job(
        row.parameters, row.gpus, card.memory_bytes, row.shape, row.sequence, row.microbatch, row.global_batch, False, card,
        Link(LATENCY_S, card.link_bytes_per_s, gpus.LINK_SHARE),
        Link(NODE_LATENCY_S, card.node_link_bytes_per_s, gpus.NODE_LINK_SHARE), row.gpus_per_node,
        WEIGHTS[row.precision], row.recompute, row.flash, row.sequence_parallel, 0.0, row.fp8, row.overlap_tp, row.chunks,
    )  # fmt: skip
    return job, Layout(row.tp, row.pp, row.dp, row.zero, row.cp, row.ep, row.chunks)


@dataclass(frozen=True)
class Compared:
    """One published number beside the predicted one."""

    row: Row
    what: str  # step, peak, rest, activations
    predicted: float
    measured: float
    held_out: bool
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compared() -> list[Compared]:
    """Every published number, in the order of the file."""
    return [each for place in range(len(published().rows)) for each in of_row(place)]


def of_row(place: int) -> Iterator[Compared]:
    row = published().rows[place]
    job, layout = asked(row)
    out = place % 3 == HELD_OUT
    fitted = any(row.name in names for names in published().fit.values())
    priced = cost(job, layout)
    rest = sum(priced.memory[name] for name in ("parameters", "gradients", "optimizer"))
    for what, measured, predicted in (
        ("step", row.step_s, priced.step_s),
        ("peak", row.peak_bytes, priced.held_bytes),
        ("rest", row.rest_bytes, rest),
        ("activations", row.activation_bytes, priced.memory["activations"]),
    ):
        if measured is not None:
            yield Compared(row, what, predicted, measured, out, fitted and what == "step")


def score_lines() -> list[str]:
    """The score: a table of steps and one of memory, worst first, and sums."""
    found = compared()
    steps = [each for each in found if each.what == "step"]
    memory = [each for each in found if each.what != "step"]
    return [
        *table_of(steps, three_digits), "", *table_of(memory, human_bytes), "",
        summary("step, all rows", steps, NEAR),
        summary("step, in no fit", [each for each in steps if each.held_out], NEAR),
        summary("step, not fitted", [each for each in steps if not each.fitted], NEAR),
        *(summary(f"step, {kind}", of_kind(steps, kind), NEAR) for kind in published().fit),
        summary("memory, all rows", memory, MEMORY_NEAR),
        *(summary(f"memory, {name}", [each for each in memory if each.row.name.startswith(name)], MEMORY_NEAR)
          for name in dict.fromkeys(each.row.name.split()[0] for each in memory)),
    ]  # fmt: skip


def of_kind(found: Sequence[Compared], kind: str) -> list[Compared]:
    return [each for each in found if kind_of(each.row) == kind]


def kind_of(row: Row) -> str:
    kind: str = tables()["gpus"][row.gpu]["kind"]
    return kind


def table_of(found: Sequence[Compared], shown: Callable[[float], str]) -> list[str]:
    rows = [
        [each.row.name, each.what, shown(each.predicted), shown(each.measured), f"{each.error:+.0%}", use_of(each)]
        for each in sorted(found, key=lambda each: -abs(math.log1p(each.error)))
    ]
    return aligned(["row", "of", "planned", "measured", "error", "fit"], rows)


def use_of(each: Compared) -> str:
    return "in" if each.fitted else "out" if each.held_out else "-"


def summary(name: str, found: Sequence[Compared], near: float) -> str:
    errors = [abs(each.error) for each in found]
    within = sum(error <= near for error in errors)
    return (
        f"{name:<21}{len(errors)} rows: median error {median(errors):.1%}, {within} ({within / len(errors):.0%}) within"
        f" {near:.0%}, worst {max((each.error for each in found), key=abs):+.0%}"
    )
