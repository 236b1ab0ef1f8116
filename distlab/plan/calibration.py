"""What a finished run measured in place of a data sheet: a `comm` run gives the link, a run that trained gives FLOP/s,
so that a step of the lab's own ranks is predicted with numbers of their machine; the file of benchmarks.gpu gives a
card's.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distlab.collectives.costs import FITTED, LATENCY, RATE
from distlab.plan.card import Card, read_card
from distlab.plan.job import Link, NotASize, count
from distlab.plan.model import Shape
from distlab.plan.step_time import executed_flops
from distlab.report.reading import BrokenRecord, read_run
from distlab.report.records import Profile, Ranks, Start, Table, select

PREFERRED = ("gloo", "ring")  # what dp's variants call
VOCABULARY = 256  # of the lab's models, whose tokens are bytes (distlab/workload/model.py, which imports torch)


@dataclass(frozen=True)
class Measured:
    """What one run says: a link or a rank's FLOP/s, and the words that say where it is from; or what a card does."""

    link: Link | None
    flops: float | None
    told: str
    card: Card | None = None

    def of_shape(self, shape: Shape, seq: int, samples: int) -> "Measured":
        """The same with the FLOP/s that a card reaches on this model's products, where it was one that was measured."""
        if self.card is None:
            return self
        step_s = self.card.step_s(shape.layers, shape.width, seq, samples, shape.vocabulary)
        flops = executed_flops(shape, shape.body + shape.ends, seq, seq * samples) / step_s
        told = f"{self.told}: {flops / 1e12:.3g} TFLOP/s by the sum of this model's parts, with {shape.vocabulary}"
        return replace(self, flops=flops, told=f"{told} tokens to choose from")


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
    """The latency and the rate that `comm` fitted to its all_reduce, gloo's own first."""
    table = next((table for _, table in select(records, Table) if table.title == FITTED), None)
    rows = {} if table is None else {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    name = next((name for name in (*PREFERRED, *rows) if name in rows), None)
    if name is None:
        raise BrokenRecord(
            f"{folder} has no fitted all_reduce: it takes a comm run of two ranks or more that came to its end"
        )
    latency, rate = (_number(folder, rows[name].get(column)) for column in (LATENCY, RATE))
    if rate <= 0:
        raise BrokenRecord(
            f"{folder} was fitted with a rate of {rate:g} GB/s: its times did not grow with size, run it again"
        )
    # A least-squares fit of a link with next to no latency may end a little below zero.
    link = Link(max(0.0, latency) * 1e-6, rate * 1e9)
    return Measured(link, None, f"the link from {folder} ({name}): α = {latency:.3g} us, B = {rate:.3g} GB/s")


def _number(folder: Path, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BrokenRecord(f"{folder} has {value!r} where a fitted number belongs") from None


def flops_of(folder: Path, records: Ranks, start: Start) -> Measured:
    """FLOP/s of a rank: 6·P·tokens of a step over the seconds of its forward and backward pass.

    The variant whose slowest rank computes fastest counts: in the others communication takes the same cores meanwhile.
    """
    found = re.search(r"([0-9.]+[kKMB]?) parameters", start.title)
    compute: dict[str, list[float]] = {}
    for _, profile in select(records, Profile):
        compute.setdefault(profile.variant, []).append(
            sum(profile.seconds.get(kind, 0) for kind in ("forward", "backward"))
        )
    usable = {name: max(seconds) for name, seconds in compute.items() if min(seconds) > 0}
    if found is None or not usable or start.run_mode not in ("dp", "fsdp"):
        raise BrokenRecord(
            f"{folder} is a run of {start.run_mode}: it takes a comm run for the link, or a dp or fsdp run for FLOP/s,"
            " come to its end"
        )
    try:
        num_parameters = count(found[1])
    except NotASize as error:
        raise BrokenRecord(f"{folder} calls its model {start.title!r}, which {error}") from None
    config = start.config
    gpt = config["LAB_MODEL"] == "gpt"
    positions = int(config["LAB_SEQ"]) if gpt else 1
    tokens = int(config["LAB_BATCH"]) * positions / start.world_size
    recompute = "full" if config.get("LAB_RECOMPUTE") else "none"
    name = min(usable, key=lambda each: usable[each])
    flops = executed_flops(shape_of(config), num_parameters, positions, tokens, recompute) / usable[name]
    return Measured(None, flops, f"compute from {folder} ({name}): {flops / 1e9:.3g} GFLOP/s a rank")


def shape_of(config: dict[str, Any]) -> Shape:
    """The lab's own model, as its settings say."""
    layers, width, heads = (int(config[name]) for name in ("LAB_DEPTH", "LAB_WIDTH", "LAB_HEADS"))
    if config["LAB_MODEL"] == "gpt":
        return Shape(layers, width, heads, heads, 4 * width, False, VOCABULARY, bool(config.get("LAB_TIED")))
    return Shape(1, 1, 1, 1, 1, False, 0, True)  # rows through matrices: no attention, no vocabulary
