"""Who does how much of attention: the (row, key) pairs that each rank computed, and the busiest one's share of them.

A causal mask gives the last positions most to do. What a variant should do follows from who holds which positions, what
it does is counted (kernels.py). The processor's time in attention stands beside it, and is only shown. The order of
kernels and receives is held, too: keys have to be on their way while others are computed with.
"""

from typing import NamedTuple

import torch

from experiments.cp.kernels import COMPUTE, RECEIVE, Kernels
from experiments.cp.predictions import BY_HAND, positions_of
from workers.config import Config
from workers.lab import Lab
from workers.measure.formulas import PYTORCHS
from workers.measure.formulas.context import causal_share
from workers.parallel.positions import Positions
from workers.parallel.slices import shares

PAIRS, BALANCE, AHEAD = "attention pairs", "balance", "keys ahead"


class Work(NamedTuple):
    """What attention should cost each rank, for one sample and layer."""

    pairs: list[int]
    share: float  # of the busiest rank over the mean
    formula: str


def predicted(variant: str, config: Config) -> Work:
    """By who holds what; forward alone."""
    positions, ranks = positions_of(variant, config), config.world_size
    if variant == "gathered":
        rows = [each * config.seq * config.heads for each in positions.num_rows]
        return Work(rows, max(rows) * ranks / sum(rows), "all keys for every row")
    if variant == "ulysses":
        heads = shares(config.heads, ranks)
        every = config.seq * (config.seq + 1) // 2
        return Work([every * each for each in heads], max(heads) * ranks / sum(heads), "the busiest one's heads")
    work = [positions.pairs(rank) * config.heads for rank in range(ranks)]
    folded = variant != "ring"
    return Work(work, 1.0 if folded else causal_share(ranks), "1" if folded else "(2c-1)/c")


def tolerance(config: Config) -> float:
    """0.02; or where a rank has few rows, what two of them more or less make."""
    return max(0.02, 2 * config.world_size / config.seq)


class Told(NamedTuple):
    """Of one variant: the share by its formula, and by rank the pairs that were counted and the CPU seconds in them."""

    name: str
    predicted: float
    pairs: tuple[float, ...]
    cpu_s: tuple[float, ...]


def compare_balance(lab: Lab, variants: list[str]) -> None:
    """One step of each variant under `Kernels`: hold pairs, share and order against what they should be."""
    if lab.device.type != "cpu":
        lab.say("not counted: it is the CPU's kernel that is watched", "balance")
        return
    told = [of_variant(lab, name) for name in variants]
    tell(lab, [each for each in told if each is not None])


def of_variant(lab: Lab, name: str) -> Told | None:
    """Its claims; what there is to tell of it, on rank 0."""
    seen, work = watched(lab, name), predicted(name, lab.config)
    shown = "" if name in BY_HAND else PYTORCHS
    lab.compare(
        PAIRS, twice(lab.config) * work.pairs[lab.rank], seen.pairs, "pairs", 0, name, work.formula, shown=shown,
        control="LAB_BUG=unfolded",
    )  # fmt: skip
    if name in ("ring", "zigzag", "shift"):
        check_ahead(lab, name, seen.order)
    everyone = lab.exchange.gather(f"work of {name}", (seen.pairs, seen.cpu_s))
    if everyone is None:
        return None
    pairs, cpu_s = zip(*everyone, strict=True)
    lab.compare(BALANCE, work.share, busiest(pairs), "", tolerance(lab.config), name, work.formula, shown=shown)
    return Told(name, work.share, pairs, cpu_s)


def twice(config: Config) -> int:
    """How often a step does the work of one sample and layer: forward and backward."""
    return 2 * config.batch * config.depth


def tell(lab: Lab, told: list[Told]) -> None:
    """As a table and a chart."""
    needed = lab.config.seq * (lab.config.seq + 1) // 2 * lab.config.heads * twice(lab.config)
    rows, shares_of = [], dict[str, list[list[float]]]()
    for name, wanted, pairs, cpu_s in told:
        cells = [f"{wanted:.3f}", f"{busiest(pairs):.3f}", f"{sum(pairs) / needed:.2f}"]
        rows.append([name, *cells, " ".join(f"{each * 1e3:.1f}" for each in cpu_s), f"{busiest(cpu_s):.2f}"])
        shares_of[name] = [list(map(float, range(len(pairs)))), [each * len(pairs) / sum(pairs) for each in pairs]]
    columns = ["variant", "by formula", "counted", "of what is needed", "CPU ms of attention by rank", "its share"]
    lab.table("Causal work: the busiest rank over the mean of all", columns, rows)
    lab.chart("Causal work of each rank over the mean of all", "rank", "share", shares_of)


def busiest(amounts: tuple[float, ...]) -> float:
    """The largest over the mean; 1 where there is none."""
    return max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else 1.0


def watched(lab: Lab, name: str) -> Kernels:
    """The second of two steps."""
    (build,) = [each.build for each in lab.mode.variants if each.name == name]
    assert build is not None
    dtype = getattr(torch, lab.config.dtype)
    lab.at(0, f"balance of {name}")
    strategy, microbatches = build(lab.model(dtype), lab.mesh, lab.config), lab.dealt(lab.batches(dtype), 0)
    strategy.backward(microbatches)
    seen = Kernels()
    with seen:
        strategy.backward(microbatches)
    return seen


def check_ahead(lab: Lab, name: str, order: list[str]) -> None:
    """Keys are asked for before those that are there are computed with, in every layer and both ways."""
    wanted = drawn(name, lab.config, lab.rank)
    parted = next((at for at, (one, other) in enumerate(zip(order, wanted, strict=False)) if one != other), None)
    faults = int(order != wanted)
    told = f"they part at {parted}" if parted is not None else f"{len(order)} of {len(wanted)}"
    lab.check(AHEAD, faults, 0, name, told if faults else f"{len(order)} receives and blocks in their order")


def sent_to(name: str, positions: Positions, rank: int, source: int) -> int:
    """The keys of `source` that come to `rank`: those that it sees, or in a ring all."""
    return positions.seen(rank, source).num_keys if name == "shift" else positions.num_rows[source]


def sent_back(name: str, positions: Positions, rank: int, distance: int, ranks: int) -> int:
    """The gradients of keys that come in turn `distance`: of this rank's own, or in a ring of those that come next."""
    if name == "shift":
        return positions.seen((rank + distance) % ranks, rank).num_keys
    return positions.num_rows[(rank - distance - 1) % ranks]


def drawn(name: str, config: Config, rank: int) -> list[str]:
    """The order of one step on a rank: receive the next keys, compute with those that are there; backward behind each
    block the gradients that follow them."""
    positions, ranks = positions_of(name, config), config.world_size
    forward, backward = list[str](), list[str]()
    come = [sent_to(name, positions, rank, (rank - distance) % ranks) for distance in range(ranks)]
    back = [sent_back(name, positions, rank, distance, ranks) for distance in range(ranks)]
    for distance in range(ranks):
        following = distance < ranks - 1 and come[distance + 1] > 0
        source = (rank - distance) % ranks
        computes = positions.num_rows[rank] > 0 if source == rank else positions.seen(rank, source).num_keys > 0
        block = [RECEIVE] * following + [COMPUTE] * computes
        gradient = distance > 0 and back[distance] > 0
        forward += block
        backward += block + [RECEIVE] * gradient
    return (forward * config.depth + backward * config.depth) * config.num_microbatches
