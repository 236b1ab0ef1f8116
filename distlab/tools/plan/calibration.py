"""Use measured numbers in place of data sheets: links from `comm` runs, FLOP/s from training runs, so that a step of
the lab's own ranks is predicted with numbers of their machine; and a card's from the file of benchmarks.gpu.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from distlab.lab.report.reading import BrokenRecord, read_run
from distlab.lab.report.records import Load, Profile, Ranks, Start, Table, select
from distlab.techniques.collectives.costs import FITTED, LATENCY, RATE
from distlab.tools.plan.card import Card, read_card
from distlab.tools.plan.gpu import Gpu, Shares
from distlab.tools.plan.job import Link
from distlab.tools.plan.model import Shape
from distlab.tools.plan.step_time import executed_flops

PREFERRED = ("gloo", "ring")  # what dp's variants call
BY_HAND = "direct"  # what sharded strategies call for both halves
VOCABULARY = 256  # of the lab's models, whose tokens are bytes (distlab/lab/workload/model.py, which imports torch)


@dataclass(frozen=True)
class Measured:
    """What was measured: a run's link or FLOP/s per rank with its source in words, or a card.

    `crowded`: its ranks filled all cores of their machine, which then move the bytes too and hide no message.
    """

    link: Link | None
    flops: float | None
    source: str
    card: Card | None = None
    crowded: bool = False

    def of_shape(self, shape: Shape, seq: int, samples: int) -> "Measured":
        """Return a copy with the FLOP/s that a measured card reaches on this model's products."""
        if self.card is None:
            return self
        step_s = self.card.step_s(shape.layers, shape.width, seq, samples, shape.vocabulary)
        flops = executed_flops(shape, shape.body + shape.ends, seq, seq * samples) / step_s
        source = f"{self.source}: {flops / 1e12:.3g} TFLOP/s by the sum of this model's parts, with {shape.vocabulary}"
        return replace(self, flops=flops, source=f"{source} tokens to choose from")


def calibrate(folder: Path) -> Measured:
    """Read one run, or the file of a card; raises BrokenRecord if there is nothing in it to calibrate with."""
    if folder.is_file():
        card = read_card(folder)
        return Measured(None, None, f"compute from {folder} ({card.name})", card)
    records = read_run(folder)
    start = next((start for _, start in select(records, Start)), None)
    if start is None:
        raise BrokenRecord(f"{folder} has no first record")
    return link_of(folder, records) if start.run_mode == "comm" else flops_of(folder, records, start)


def link_of(folder: Path, records: Ranks) -> Measured:
    """Return the latency and rate that `comm` fitted to its all_reduce, preferably to gloo's own."""
    table = next((table for _, table in select(records, Table) if table.title == FITTED), None)
    rows = {} if table is None else {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    name = next((name for name in (*PREFERRED, *rows) if name in rows), None)
    if name is None:
        raise BrokenRecord(f"{folder} has no fitted all_reduce: it takes a finished comm run of two ranks or more")
    latency, rate = (_number(folder, rows[name].get(column)) for column in (LATENCY, RATE))
    if rate <= 0:
        raise BrokenRecord(
            f"{folder} was fitted with a rate of {rate:g} GB/s: its times did not grow with size, run it again"
        )
    # A least-squares fit of a link with next to no latency may end a little below zero.
    link = Link(max(0.0, latency) * 1e-6, rate * 1e9, halves=halves_of(records, name))
    source = f"the link from {folder} ({name}): α = {latency:.3g} us, B = {rate:.3g} GB/s"
    halves_text = (
        f"; a reduce_scatter and an all_gather take {link.halves:.2f} times an all_reduce" if link.halves != 1 else ""
    )
    return Measured(link, None, source + halves_text)


HALVES = ("reduce_scatter", "all_gather")
LEAST_BYTES = ("MiB", "GiB")  # sizes at which bytes count more than latency


def halves_of(records: Ranks, name: str) -> float:
    """Return the time of both hand-written halves divided by an all_reduce's, the median of `comm`'s large sizes; 1
    without a sweep."""
    times: dict[str, dict[str, float]] = {}
    for _, table in select(records, Table):
        if table.title in (*HALVES, "all_reduce") and {"size", "variant", "us"} <= set(table.columns):
            variant = name if table.title == "all_reduce" else BY_HAND
            rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            times[table.title] = {row["size"]: float(row["us"]) for row in rows if row["variant"] == variant}
    sums, *halves = (times.get(title, {}) for title in ("all_reduce", *HALVES))
    sizes = [size for size in sums if size.endswith(LEAST_BYTES) and all(size in half for half in halves)]
    return median(sum(half[size] for half in halves) / sums[size] for size in sizes) if sizes else 1.0


def _number(folder: Path, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BrokenRecord(f"{folder} has {value!r} where a fitted number belongs") from None


def flops_of(folder: Path, records: Ranks, start: Start) -> Measured:
    """Return FLOP/s per rank of a dp or fsdp run of gpt; raises BrokenRecord for other runs, or without timed steps."""
    gpt = start.config.get("LAB_MODEL") == "gpt"
    found = reached(folder, records, start) if gpt and start.run_mode in ("dp", "fsdp") else None
    if found is None:
        raise BrokenRecord(
            f"{folder} is a run of {start.run_mode}: it takes a finished run, of comm for the link, or of dp or fsdp with"
            " LAB_MODEL=gpt for FLOP/s"
        )
    return found


def reached(folder: Path, records: Ranks, start: Start) -> Measured | None:
    """Return FLOP/s per rank: 1/N of a step's operations divided by forward and backward seconds; None if the run
    timed no step.

    The hand-written variant whose slowest rank is fastest counts: in others communication competes for the cores,
    and PyTorch's own communicate during their passes.
    """
    compute: dict[str, list[float]] = {}
    for _, profile in select(records, Profile):
        if profile.variant not in start.by_torch:
            seconds = [profile.seconds.get(kind, 0.0) for kind in ("forward", "backward")]
            compute.setdefault(profile.variant, []).append(sum(seconds))
    usable = {name: max(seconds) for name, seconds in compute.items() if min(seconds) > 0}
    if not usable:
        return None
    config, shape, positions = start.config, shape_of(start.config), int(start.config["LAB_SEQ"])
    tokens = int(config["LAB_BATCH"]) * positions / start.world_size
    recompute = "full" if config.get("LAB_RECOMPUTE") else "none"
    name = min(usable, key=lambda each: usable[each])
    flops = executed_flops(shape, lab_parameters(shape, positions), positions, tokens, recompute) / usable[name]
    source = f"compute from {folder} ({name}): {flops / 1e9:.3g} GFLOP/s per rank"
    crowded = fills_cores(records, int(config.get("LAB_THREADS") or 1))
    source += "; ranks fill all cores, so that no message is hidden" if crowded else ""
    return Measured(None, flops, source, crowded=crowded)


def shape_of(config: dict[str, Any]) -> Shape:
    """Return the shape of the lab's GPT with these settings."""
    layers, width, heads = (int(config[name]) for name in ("LAB_DEPTH", "LAB_WIDTH", "LAB_HEADS"))
    return Shape(layers, width, heads, heads, 4 * width, False, VOCABULARY, bool(config.get("LAB_TIE")))


def lab_parameters(shape: Shape, positions: int) -> float:
    """Count all parameters of the lab's GPT: matrices; biases and norms, 13·h per layer and 2·h at the end; a vector
    per position (distlab/lab/workload/model.py)."""
    return shape.body + shape.ends + shape.width * (13 * shape.layers + 2 + positions)


def fills_cores(records: Ranks, threads: int) -> bool:
    """Return whether the ranks of any machine use as many threads as it has cores."""
    loads = dict(select(records, Load))
    ranks = Counter(load.machine for load in loads.values())
    return any(ranks[load.machine] * threads >= load.cores for load in loads.values())


def measured_card(gpu: Gpu, flops: float) -> Gpu:
    """Return a card with the measured FLOP/s of a whole step; its other rates do not count."""
    return replace(
        gpu, name="measured", flops=flops, memory_bytes_per_s=math.inf, shares=Shares(1.0, 1.0, 1.0), told="measured"
    )
