"""A hundred bits flip, and the audit names each: `python -m benchmarks.flips [FLIPS]`.

Ranks train as in a run, and every step is audited. In each a bit of one tensor that ranks hold alike flips on one of
them: of a gradient once it is summed, or of a weight once it is updated; which rank, tensor, number and bit a seed
draws. What the audit of that very step says has to name rank, tensor and step, or of two holders both; then the weights
are put back. In the last row nothing flips, and nothing may be named.
"""

import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from benchmarks.rounds import table
from distlab.cluster.control_plane import Exchange
from distlab.config import Config
from distlab.config.fault_spec import BITS
from distlab.contract import Strategy
from distlab.faults import flip
from distlab.lab import Lab, RunHooks
from distlab.measure.traffic import Ledger
from distlab.rank.mode_loader import load
from distlab.report.records import Corrupted
from distlab.report.run_folder import Journal, Level
from distlab.testing.warm_ranks import Ranks
from distlab.verify.silent_corruption import KINDS, Corruption, alike

FLIPS, SEED = 100, 1
SIZES = {"LAB_WIDTH": "48", "LAB_DEPTH": "3", "LAB_HEADS": "6", "LAB_SEQ": "16"}


class Way(NamedTuple):
    """One row: what is trained by how many ranks, and which kinds of tensors change."""

    mode: str
    variant: str
    world_size: int
    kinds: Sequence[str] = KINDS
    settings: dict[str, str] = {}  # noqa: RUF012  nobody changes it

    def __str__(self) -> str:
        given = "".join(f" {name}={value}" for name, value in self.settings.items())
        return f"{self.mode} {self.variant}, {self.world_size} ranks{given}"


WAYS = (
    Way("dp", "flat", 3),
    Way("dp", "flat", 2),
    Way("dp", "ddp", 4, settings={"LAB_DTYPE": "bfloat16"}),
    Way("tp", "megatron", 3),
    Way("pp", "1f1b", 3, settings={"LAB_TIE": "1"}),
    Way("fsdp", "zero2", 3, kinds=("weights",)),
    Way("dp", "flat", 3, kinds=()),
)


class Flipped(NamedTuple):
    """What changes in a step; drawn alike on all ranks."""

    kind: str
    name: str
    rank: int
    bits: str


class Quiet(Journal):
    """Records alone."""

    def say(self, text: str, at: Level = "quiet", *, kept: bool = True) -> None:
        """Not a word of each."""


def lab_of(group: dist.ProcessGroup, config: Config, name: str) -> Lab:
    """A lab without a run around it."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    exchange = Exchange(store, group.rank(), group.size(), config.collective_timeout_s)
    mode, device = load(config.run_mode), torch.device("cpu")
    return Lab(config, mode, device, group, exchange, cast(Ledger, None), Quiet(), RunHooks())


def trained(group: dist.ProcessGroup, way: Way, steps: int) -> dict[str, tuple[int, int]]:
    """By kind of bit the flips that were named as they should be, and all."""
    given = {"RUN_MODE": way.mode, "WORLD_SIZE": str(way.world_size), "LAB_STEPS": str(steps)} | SIZES | way.settings
    config = Config.read(given | {"RANK": str(group.rank()), "MASTER_ADDR": "127.0.0.1"})
    lab, dtype, draw = lab_of(group, config, f"{way}{way.kinds}"), getattr(torch, config.dtype), random.Random(SEED)
    (build,) = [each.build for each in lab.mode.variants if each.name == way.variant]
    assert build is not None
    strategy, batches = build(lab.model(dtype), lab.mesh, config), lab.batches(dtype)
    right: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for step in range(steps):
        corruption = Corruption(lab, {way.variant: strategy}, every=1)  # which knows nothing of the flips before
        flipped = drawn(corruption.holders[way.variant], way.kinds, BITS[step % len(BITS)], draw)
        audited_step(lab, strategy, corruption, (way.variant, step), flipped, lab.dealt(batches, step))
        found = [each for each in lab.journal.records if isinstance(each, Corrupted) and each.step == step]
        label = flipped.bits if flipped else "none"
        made[label] += 1
        right[label] += is_named(found, flipped)
    return {label: (right[label], made[label]) for label in made}


def drawn(holders: dict[str, list[int]], kinds: Sequence[str], bits: str, draw: random.Random) -> Flipped | None:
    """What flips in a step, if anything does."""
    if not kinds:
        return None
    name = draw.choice(sorted(holders))
    return Flipped(draw.choice(kinds), name, draw.choice(holders[name]), bits)


def audited_step(
    lab: Lab, strategy: Strategy, corruption: Corruption, where: tuple[str, int], flipped: Flipped | None, samples: Any
) -> None:
    """One step with its flip and its audit, after which the weights are as before."""
    before = [(tensor, tensor.clone()) for _, tensor in alike(strategy, "weights")]
    strategy.backward(samples)
    for kind in KINDS:
        if kind == "weights":
            strategy.update()
        if flipped is not None and (flipped.kind, flipped.rank) == (kind, lab.rank):
            flip(dict(alike(strategy, kind))[flipped.name], flipped.bits, random.Random(f"{SEED} {where[1]}"))
        corruption.hash(kind, where[0], strategy, where[1])
    corruption.compare(*where)
    with torch.no_grad():
        for tensor, saved in before:
            tensor.copy_(saved)


def is_named(found: list[Corrupted], flipped: Flipped | None) -> bool:
    """Whether rank 0 was told of that rank and tensor, first of all and by majority where there is one."""
    if flipped is None or not found:
        return not found and flipped is None
    told = found[0].ranks == [flipped.rank] if found[0].majority else flipped.rank in found[0].ranks
    return told and found[0].tensor == f"{flipped.kind}.{flipped.name}"


def main(flips: int = FLIPS) -> None:
    """Print how many were named of each kind."""
    rows = []
    ranks = Ranks(str(Path.cwd()), ["tests.preloaded"])
    for way in WAYS:
        counts = ranks(way.world_size, trained, way, flips, timeout_s=600)[0]
        shown = [f"{counts[bits][0]} of {counts[bits][1]}" if bits in counts else "-" for bits in BITS]
        right, made = (sum(each[place] for each in counts.values()) for place in (0, 1))
        rows.append([way, ", ".join(way.kinds) or "nothing", *shown, f"{right} of {made}"])
    ranks.close()
    print(f"{flips} steps a row; named by rank, tensor and step, or right to say nothing:")
    print(table(["trained", "what flips", *BITS, "all"], rows))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
