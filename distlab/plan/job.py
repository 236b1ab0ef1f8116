"""What is asked: a model, a machine, and how a step is made.

What was not said is guessed, by rules that are printed, or taken from a finished run: a `comm` run gives the link, a
run that trained gives FLOP/s, so that a step of the lab's own ranks is predicted with numbers of their machine.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distlab.collectives.costs import FITTED, LATENCY, RATE, training_flops
from distlab.plan.card import Card, read_card
from distlab.report.reading import BrokenRecord, read_run
from distlab.report.records import Profile, Ranks, Start, Table, select


@dataclass(frozen=True)
class Shape:
    """A GPT of `layers` blocks, `heads` heads in all `width` numbers wide."""

    layers: int
    width: int
    heads: int

    @property
    def num_parameters(self) -> float:
        """12·L·h²: four matrices of h x h in attention, two of h x 4h behind it; embeddings and biases are left out."""
        return 12.0 * self.layers * self.width**2


@dataclass(frozen=True)
class Link:
    """What a message costs: a latency, and its bytes at a rate that is one rank's, one way."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Job:
    """Everything that a cost depends on. Bytes are bytes, seconds seconds, `flops` a GPU's peak in FLOP/s."""

    num_parameters: float
    gpus: int
    gpu_memory_bytes: float
    shape: Shape
    seq: int
    samples: int  # of one microbatch
    global_samples: int  # of a step, over all GPUs, the same for every strategy
    grows: bool  # with the GPUs, where it was not given
    link: Link  # between nodes
    node_link: Link  # inside a node
    gpus_per_node: int
    flops: float
    flops_from: str  # whose peak that is, in words
    utilisation: float
    itemsize: int  # of weights, gradients and activations
    masters: bool  # the optimizer keeps weights of its own in float32: mixed precision
    moments: int  # of the optimizer: 2 with Adam
    recompute: str
    sequence_parallel: bool
    reserve: float  # share of the memory that is left to the GPU's runtime, its libraries and fragmentation

    @property
    def node_gpus(self) -> int:
        """GPUs that share a node. Neighbours share one wherever they stand only if their number divides this."""
        return min(self.gpus, self.gpus_per_node)

    def on(self, gpus: int) -> "Job":
        """The same on more GPUs: with a batch as much larger, unless it was given."""
        factor = gpus / self.gpus if self.grows else 1
        return replace(self, gpus=gpus, global_samples=round(self.global_samples * factor))

    @property
    def usable_bytes(self) -> float:
        return self.gpu_memory_bytes * (1 - self.reserve)


ASPECT = 128  # width over layers, as in GPT-3 of 6.7B (4096 over 32) and of 175B (12288 over 96)


def guessed(
    num_parameters: float, layers: int | None = None, width: int | None = None, heads: int | None = None
) -> Shape:
    """A GPT-like shape of P = 12·L·h² with h = 128·L; whatever is given stays. 7B: 32 layers, 4096 wide; 175B: 96,
    12288."""
    layers = layers or guessed_layers(num_parameters, width)
    width = width or guessed_width(math.sqrt(num_parameters / (12 * layers)), heads)
    return Shape(layers, width, heads or guessed_heads(width))


def guessed_layers(num_parameters: float, width: int | None) -> int:
    """L = P/(12·h²), or with h = 128·L a multiple of 4."""
    if width is not None:
        return max(1, round(num_parameters / (12 * width**2)))
    exact: float = (num_parameters / (12 * ASPECT**2)) ** (1 / 3)
    return max(1, 4 * round(exact / 4) or round(exact))


def guessed_width(exact: float, heads: int | None) -> int:
    """The nearest multiple of the heads; or of 8 heads, each of 128 numbers or, in a narrow model, a smaller power of
    two."""
    if heads is None:
        heads = 8 * min(128, 1 << max(0, int(math.log2(max(1.0, exact / 16)))))
    return heads * max(1, round(exact / heads))


def guessed_heads(width: int) -> int:
    """As many as divide the width, of 128 numbers or more each; in a narrow model 8 at most."""
    return max(count for count in range(1, max(8, width // 128) + 1) if width % count == 0)


# Sizes as people write them, 7B, 80GB, 400Gbit, and back. Units are powers of ten, GiB and its kin powers of two.

COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
PREFIXES = {
    "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40,
}  # fmt: skip
NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
# What is less is nothing, what is more no machine: an exabyte, 10^18 parameters, 10^9 GPUs, layers or tokens. Between
# them no sum overflows, whatever is multiplied.
LEAST, MOST, MOST_WHOLE = 1e-9, 1e18, 1e9


class NotASize(ValueError):
    """The message says what is wrong with the value, and what is allowed."""


def _matched(pattern: str, written: str, otherwise: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Match[str]:
    match = re.fullmatch(pattern, written.strip(), flags)
    if match is None:
        raise NotASize(otherwise)
    return match


def _bounded(number: str, factor: float, least: float = LEAST, most: float = MOST) -> float:
    value = float(number) * factor
    if value > most:
        raise NotASize(f"is beyond any machine, allowed: up to {most:g}")
    if value < least:
        raise NotASize("is nothing, allowed: more than 0")
    return value


def count(written: str) -> float:
    """7B as 7e9: parameters, or FLOP/s with T; K, M, B (or G) and T are powers of ten."""
    match = _matched(NUMBER + "([KMBGT]?)", written, "is not a number such as 350M, 7B or 1.3B")
    return _bounded(match[1], COUNTS[match[2].upper().replace("G", "B")])


def whole_number(written: str) -> int:
    """A whole number from 1 to a billion."""
    match = _matched("[0-9]+", written, "is not a whole number")
    return int(_bounded(match[0], 1, most=MOST_WHOLE))


def nbytes(written: str) -> float:
    """80GB as 8e10 bytes, 80GiB as 80·2^30."""
    match = _matched(NUMBER + "([kmgt]i|[kmgt]?)b", written, "is not a size such as 80GB, 900MB or 80GiB")
    return _bounded(match[1], PREFIXES[match[2].lower()])


def rate(written: str) -> float:
    """400Gbit, 400Gbit/s, 400Gbps, 50GB/s or 50GBps as bytes a second: B is a byte, and b alone is refused for what it
    may be."""
    otherwise = "is not a rate such as 400Gbit, 100mbit or 400Gbps, in bits, or 50GB/s or 50GBps, in bytes"
    pattern = NUMBER + "([kKmMgGtT]?)(?:((?i:bit)(?:/s)?|bps)|B(?:/s|ps)?)"
    match = _matched(pattern, written, otherwise, re.NOFLAG)
    return _bounded(match[1], PREFIXES[match[2].lower()] / (8 if match[3] else 1))


def seconds(written: str) -> float:
    """5us as 5e-6 seconds; 0 is allowed: a link without latency."""
    match = _matched(NUMBER + "(us|ms|s)", written, "is not a time such as 5us or 2ms")
    return _bounded(match[1], {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2].lower()], least=0)


def share(written: str) -> float:
    """40% or 0.4 as 0.4; more than 0, up to 1."""
    match = _matched(NUMBER + "(%?)", written, "is not a share such as 40% or 0.4")
    value = float(match[1]) / (100 if match[2] else 1)
    if not LEAST <= value <= 1:
        raise NotASize("is out of range, allowed: more than 0, up to 1 (100%)")
    return value


def shown_count(value: float) -> str:
    """7e9 as "7B"."""
    for letter in ("T", "B", "M", "K"):
        if value >= COUNTS[letter]:
            return f"{value / COUNTS[letter]:.4g}{letter}"
    return f"{value:.4g}"


# What a finished run measured in place of a data sheet.

PREFERRED = ("gloo", "ring")  # what dp's variants call


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
        step_s = self.card.step_s(shape.layers, shape.width, seq, samples, VOCABULARY)
        flops = training_flops(shape.num_parameters, seq * samples, "none") / step_s
        told = f"{self.told}: {flops / 1e12:.3g} TFLOP/s by the sum of this model's parts, with {VOCABULARY} tokens to"
        return replace(self, flops=flops, told=f"{told} choose from")


VOCABULARY = 50304  # GPT-2's, filled up to a multiple of 64


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
    positions = int(config["LAB_SEQ"]) if config["LAB_MODEL"] == "gpt" else 1
    tokens = int(config["LAB_BATCH"]) * positions / start.world_size
    recompute = "full" if config.get("LAB_RECOMPUTE") else "none"
    name = min(usable, key=lambda each: usable[each])
    flops = training_flops(num_parameters, tokens, recompute) / usable[name]
    return Measured(None, flops, f"compute from {folder} ({name}): {flops / 1e9:.3g} GFLOP/s a rank")
